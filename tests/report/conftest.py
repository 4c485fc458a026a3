"""Tiny real runs that the tests of this folder share, a page of them, a browser. Who changes a run copies it first."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from selenium import webdriver

from dualres.analyze.analysis import Analysis, write_analysis
from dualres.train.metrics import METRICS
from dualres.train.run_folder import SUMMARY
from tests.report.browsing import HIGH, start
from tests.report.reading import evaluation, make
from tests.train.tiny import tiny_config, tiny_data, train_tiny

STEPS = 24
SHORT: dict[str, Any] = {"train__tokens": STEPS * 4 * 32, "train__validate_every": 8, "train__checkpoint_every": STEPS}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def suite(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods with two seeds and one with one."""
    out = tmp_path_factory.mktemp("suites") / "tiny"
    for residual, seeds in (("standard", (0, 1)), ("dar-block", (0, 1)), ("mhc-2", (0,))):
        for seed in seeds:
            train_tiny(tiny_config(residual, train__seed=seed, **SHORT), data, out / f"{residual}-seed{seed}")
    return out


@pytest.fixture(scope="session")
def sparse(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with experts."""
    folder = tmp_path_factory.mktemp("sparse") / "dar-block-moe"
    train_tiny(tiny_config("dar-block", "moe", **SHORT), data, folder)
    assert (folder / SUMMARY).exists()
    return folder


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    found = start(tmp_path_factory.mktemp("browser"))
    yield found
    found.quit()


@pytest.fixture(scope="session")
def full_page(suite: Path, sparse: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With everything that a page can have."""
    folder = tmp_path_factory.mktemp("page")
    copied = Path(shutil.copytree(suite, folder / "suite"))
    raised = copied / f"{HIGH}-seed0" / METRICS
    rows = [json.loads(line) for line in raised.read_text().splitlines()]
    for row in rows:
        row.update({key: row[key] + 3 for key in ("loss", "validation_loss") if key in row})
    raised.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arrays = {"stream_rms": np.ones((2, 1)), "history_rms": np.ones((3, 1))}
    for run in ("standard-seed0", "dar-block-seed0"):
        write_analysis(copied / run / "analysis", Analysis({}, {}, arrays))
    evaluation(copied / "evaluations")
    make(folder / "report.html", copied, sparse, samples=True)
    return folder / "report.html"

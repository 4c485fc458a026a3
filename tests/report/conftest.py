"""Tiny real runs that the tests of this folder share; those that change one copy it first."""

from pathlib import Path
from typing import Any

import pytest

from dualres.train.run import SUMMARY
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

"""`analyze.every`: a look inside while a run trains, which changes nothing of the run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dualres.analyze.analysis import AnalysisProtocol, analyze
from dualres.analyze.health import health
from dualres.train.metrics import TENSORBOARD
from tests.small import RESIDUALS, model_config, random_tokens, stirred
from tests.train.tiny import Told, launch, metrics, rows, said, terminate, tiny_config, tiny_data, train_tiny

STEPS: dict[str, Any] = {"train__tokens": 12 * 4 * 32}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(
    ("residual", "compiled", "names"),
    [
        ("dar-block", "off", {"rms_stream_0", "rms_stream_1", "rms_history_max", "cka", "write_gap", "divergence"}),
        pytest.param(
            "dar-full",
            "default",
            {"rms_stream_0", "rms_stream_1", "rms_history_max", "cka", "write_gap", "divergence"},
            marks=pytest.mark.slow,
        ),
        ("mhc-4", "off", {*(f"rms_stream_{j}" for j in range(4)), "rms_history_max", "cka"}),
        ("attnres-block", "off", {"rms_stream_0", "rms_history_max"}),
        ("standard", "off", {"rms_stream_0", "rms_history_max"}),
    ],
)
def test_a_run_that_is_looked_at(residual: str, compiled: str, names: set[str], data: Path, tmp_path: Path):
    plain = tiny_config(residual, **STEPS, train__compile=compiled)
    looked = tiny_config(residual, **STEPS, train__compile=compiled, analyze__every=5)
    train_tiny(plain, data, tmp_path / "plain")
    train_tiny(looked, data, tmp_path / "looked")
    found = [row for row in rows(tmp_path / "looked") if any(key.startswith("analysis/") for key in row)]
    assert [row["step"] for row in found] == [5, 10]
    assert all(set(row) == {"step", *(f"analysis/{name}" for name in names)} for row in found)
    other = [row for row in rows(tmp_path / "looked") if row not in found]
    assert other == rows(tmp_path / "plain")  # to the last bit
    board = EventAccumulator(str(tmp_path / "looked" / TENSORBOARD)).Reload()
    seen = [(event.step, event.value) for event in board.Scalars("analysis/rms_stream_0")]
    assert seen == [(row["step"], pytest.approx(row["analysis/rms_stream_0"])) for row in found]


def test_interrupted_and_taken_up(data: Path, tmp_path: Path):
    """Rows come once; how often to look may change on the way."""
    config = tiny_config("dar-full", **STEPS, analyze__every=2)
    train_tiny(config, data, tmp_path / "whole")
    train_tiny(config, data, tmp_path / "cut", Told(7, terminate))
    train_tiny(config, data, tmp_path / "cut")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    train_tiny(config, data, tmp_path / "changed", Told(7, terminate))
    train_tiny(tiny_config("dar-full", **STEPS, analyze__every=100), data, tmp_path / "changed")
    looked = [row["step"] for row in rows(tmp_path / "changed") if "analysis/cka" in row]
    assert looked == [2, 4, 6, 8]  # it was asked to stop in step 7, and did after the next
    kept = [row for row in rows(tmp_path / "whole") if "analysis/cka" not in row]
    assert [row for row in rows(tmp_path / "changed") if "analysis/cka" not in row] == kept


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param("ddp", marks=pytest.mark.exhaustive),  # its ranks hold the whole model, as one process does
        pytest.param("fsdp2", marks=pytest.mark.slow),
        pytest.param("deepspeed", marks=pytest.mark.slow),
    ],
)
def test_many_processes(engine: str, data: Path, tmp_path: Path):
    """All ranks look, one logs, and sees what one process alone sees."""
    settings: dict[str, Any] = {**STEPS, "analyze__every": 5, "train__engine": engine}
    settings |= {"train__parallel__zero_stage": 3} if engine == "deepspeed" else {}
    process = launch(data, tmp_path / "many", ranks=2, residual="dar-full", **settings)
    assert process.wait() == 0, said(tmp_path / "many")
    train_tiny(tiny_config("dar-full", **STEPS, analyze__every=5), data, tmp_path / "one")
    many, one = ([row for row in rows(tmp_path / name) if "analysis/cka" in row] for name in ("many", "one"))
    assert [row["step"] for row in many] == [5, 10]
    for ours, wanted in zip(many, one, strict=True):
        assert ours == pytest.approx(wanted, rel=1e-3)


def test_the_same_numbers_as_an_analysis():
    decoder = stirred(model_config(), RESIDUALS["dar-block"], noise=0.1)
    tokens = random_tokens(1, 32)
    found = health(decoder.stack, lambda: decoder(tokens))
    analysis = analyze(decoder, tokens, AnalysisProtocol(1, 32, 1), {})
    assert found["analysis/cka"] == pytest.approx(analysis.summary["mean_cka_same_layer"], abs=1e-12)
    assert found["analysis/write_gap"] == pytest.approx(analysis.summary["mean_absolute_write_gap"], abs=1e-12)
    assert found["analysis/divergence"] == pytest.approx(analysis.summary["mean_divergence"], abs=1e-12)
    assert found["analysis/rms_stream_1"] == pytest.approx(float(analysis.arrays["stream_rms"][-1, 1]), abs=1e-12)
    assert found["analysis/rms_history_max"] == pytest.approx(float(analysis.arrays["history_rms"].max()), abs=1e-12)


def test_what_is_not_a_number_is_left_out():
    """A dead stream has no CKA, and metrics hold numbers."""
    decoder = stirred(model_config(), RESIDUALS["mhc-2"])
    with torch.no_grad():
        decoder.vocabulary.table.weight.fill_(1.0)  # the same at every token
        found = health(decoder.stack, lambda: decoder(random_tokens(1, 1)))
    assert "analysis/cka" not in found
    assert found["analysis/rms_stream_0"] > 0

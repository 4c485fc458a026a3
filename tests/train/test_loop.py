"""A run from its start to its end, stopped and taken up again, and what it refuses."""

import dataclasses
import json
import logging
import math
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dualres.cli import main
from dualres.config.schema import ConfigError
from dualres.data.loader import Loader
from dualres.data.shards import INDEX, TOKENIZER, read_index
from dualres.data.tokenizer import train_bpe
from dualres.hub.open_model import find_checkpoint, open_model
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.loss import Objective
from dualres.ops import dispatch
from dualres.train import loop, run_folder
from dualres.train.checkpoint import STATE, Checkpoints, damage
from dualres.train.engines import build
from dualres.train.loop import check_batch, say_compiling
from dualres.train.metrics import SPEED, read_rows
from dualres.train.optimizer import learning_rate
from dualres.util.errors import DataError, TrainError
from tests.train.tiny import (
    STEPS,
    Told,
    checkpoints,
    losses,
    metrics,
    overrides,
    rows,
    terminate,
    tiny_config,
    train_tiny,
)


def test_what_a_run_leaves(whole: Path):
    trained = [row for row in rows(whole) if "loss" in row]
    assert [row["step"] for row in trained] == list(range(1, STEPS + 1))
    assert [row["tokens"] for row in trained] == [128 * step for step in range(1, STEPS + 1)]
    config = tiny_config()
    wanted = [learning_rate(step, STEPS, config.train) for step in range(STEPS)]
    assert [row["learning_rate"] for row in trained] == wanted
    assert trained[-1]["loss"] < trained[0]["loss"] - 0.5  # it learns
    validated = {row["step"]: row["validation_loss"] for row in rows(whole) if "validation_loss" in row}
    assert list(validated) == [10, 20, 30, 40]
    summary = json.loads((whole / run_folder.SUMMARY).read_text())
    assert summary["validation_loss"] == validated[40]
    assert summary["tokens"] == 128 * STEPS
    assert summary["tokens_per_second"] > 0
    assert all(row["tokens_per_second"] > 0 and 0 < row["mfu"] < 1 for row in read_rows(whole / SPEED))
    assert run_folder.read_config(whole) == config
    assert list((whole / "tensorboard").iterdir())


def test_a_base_without_extras_trains(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Without numba and TensorBoard, each named once, with the command that installs it."""
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.setattr(dispatch, "INSTALLED", {"cpu": False, "triton": True})
    monkeypatch.setattr(dispatch, "_noted", set())
    changes = [word for change in overrides(train__tokens=5 * 4 * 32) for word in ("--set", change)]
    out = tmp_path / "run"
    assert main(["train", "nano", "dar-block", "--data", str(data), "--out", str(out), *changes]) == 0
    shown = capsys.readouterr().err
    for extra in ("cpu", "tensorboard"):
        assert shown.count(f"pip install -e '.[{extra}]'") == 1
    assert f"metrics are written to {out / 'metrics.jsonl'} only" in shown
    assert len(rows(out)) > 2
    assert not (out / "tensorboard").exists()


def test_the_last_checkpoints_and_the_best_are_kept(data: Path, tmp_path: Path):
    """From a rate that destroys what was learned, the best is an early one."""
    config = tiny_config(
        train__learning_rate=3.0, train__min_learning_rate=2.9, train__warmup_steps=16, train__validate_every=4
    )
    train_tiny(config, data, tmp_path / "run")
    validated = {row["step"]: row["validation_loss"] for row in rows(tmp_path / "run") if "validation_loss" in row}
    best = min(validated, key=lambda step: validated[step])
    assert best < 36  # else nothing is shown
    assert [path.name for path in checkpoints(tmp_path / "run")] == [f"step-{s:09d}" for s in (best, 36, 40)]
    assert find_checkpoint(tmp_path / "run", "best").name == f"step-{best:09d}"


def test_losses_are_of_the_data_they_name(data: Path, whole: Path):
    """The last checkpoint, evaluated anew with plain cross-entropy on the held-out tokens, one sequence at a time."""
    loaded = open_model(whole)
    held_out = Loader(data, read_index(data), "validation", 32, None)
    total = 0.0
    with torch.no_grad():
        for window in range(7):
            sequence = held_out.batch(window, 1)
            logits = loaded.decoder(sequence[:, :-1])
            total += torch.nn.functional.cross_entropy(logits[0], sequence[0, 1:]).item()
    assert rows(whole)[-1]["validation_loss"] == pytest.approx(total / 7, rel=1e-5)
    first = Loader(data, read_index(data), "train", 32, 42).batch(0, 4)
    fresh = Objective(load_fresh(), 1024)
    assert rows(whole)[0]["loss"] == pytest.approx(fresh(first).item(), rel=1e-5)


def load_fresh() -> Decoder:
    config = tiny_config()
    return build_decoder(config.model, config.residual, seed=config.train.seed)


def test_weights_are_safetensors_under_the_decoder_names(whole: Path):
    last = checkpoints(whole)[-1]
    names: set[str] = set()
    for file in (last / "weights").glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            names |= set(stored.keys())
    assert names == {f"model.{name}" for name, _ in load_fresh().named_parameters()}
    assert not [path for path in last.rglob("*") if path.suffix in (".pt", ".pth", ".pkl", ".bin", ".metadata")]
    assert json.loads((last / STATE).read_text())["sequences"] == 4 * STEPS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_saves_says_so_and_stops(data: Path, whole: Path, tmp_path: Path, number: int):
    folder = tmp_path / "run"
    told = Told(7, lambda: os.kill(os.getpid(), number))
    done = train_tiny(tiny_config(), data, folder, told)
    assert (done.step, done.finished) == (8, False)  # the step in hand is finished; the signal came after the seventh
    assert f"stopped at step 8 of {STEPS}; saved as {checkpoints(folder)[-1]}" in told.said[-1]
    assert not (folder / run_folder.SUMMARY).exists()
    again = Told()
    assert train_tiny(tiny_config(), data, folder, again).finished
    assert f"resumed from {folder / run_folder.CHECKPOINTS / 'step-000000008'}" in again.said
    assert metrics(folder) == metrics(whole)


def test_after_a_signal_ctrl_c_ends_the_process(data: Path, tmp_path: Path):
    """Not by Python, which would wait for what runs in a library."""
    seen = []

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    train_tiny(tiny_config(), data, tmp_path, Told(7, twice))
    assert seen == [signal.SIG_DFL]
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_in_the_first_step_has_nothing_to_save(data: Path, tmp_path: Path):
    class Impatient(Told):
        def show(self, text: str, fraction: float | None = None) -> None:
            if text == "running the first step":
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_tiny(tiny_config(), data, tmp_path, Impatient())
    assert not checkpoints(tmp_path)


def test_what_takes_long_before_the_first_step_is_said(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class All(Told):
        def show(self, text: str, fraction: float | None = None) -> None:
            self.said.append(text)

    monkeypatch.setattr(loop, "LARGE", 0)
    monkeypatch.setattr(build, "compile_blocks", lambda stack, mode: None)
    config = tiny_config(train__tokens=2 * 4 * 32, train__warmup_steps=1, train__compile="default")
    told, again = All(), All()
    train_tiny(
        dataclasses.replace(config, train=dataclasses.replace(config.train, peak_flops=None)), data, tmp_path, told
    )
    beginnings = ["verifying all of", "verifying", "verifying", "building the model, ", "measuring the peak FLOP/s"]
    beginnings += ["compiling blocks", "running the first step", "step 1/2"]
    for text, beginning in zip(told.said, beginnings, strict=False):
        assert text.startswith(beginning)
    train_tiny(config, data, tmp_path, again)
    assert [text.split()[0] for text in again.said] == ["building", "loading", "resumed"]  # it is finished


def test_kernels_that_compile_are_announced_once():
    told, log = Told(), logging.getLogger(dispatch.LOG)
    with say_compiling(told):
        for _ in range(2):
            log.info("compiling %s", "kernels")
    log.info("compiling after the run")
    assert told.said == ["compiling kernels"]
    assert (log.handlers, log.level, log.propagate) == ([], logging.NOTSET, True)


def test_a_finished_run_stays_as_it_is(data: Path, whole: Path):
    before = {path: path.stat().st_mtime_ns for path in (whole / run_folder.SUMMARY, checkpoints(whole)[-1])}
    assert train_tiny(tiny_config(), data, whole).finished
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_another_config_is_refused_by_key(data: Path, whole: Path):
    with pytest.raises(TrainError, match=r"train\.learning_rate 0\.003 → 0\.001.*new folder"):
        train_tiny(tiny_config(train__learning_rate=0.001), data, whole)
    with pytest.raises(TrainError, match=r"residual\.method 'dar-block' → 'standard'"):
        train_tiny(tiny_config("standard"), data, whole)


def test_how_the_work_is_done_may_change(data: Path, whole: Path, tmp_path: Path):
    folder = tmp_path / "run"
    train_tiny(tiny_config(), data, folder, Told(7, terminate))
    changed = tiny_config(train__micro_batch=4, train__recompute="full", train__loss_rows=7, train__keep_checkpoints=1)
    train_tiny(changed, data, folder)
    assert losses(folder) == pytest.approx(losses(whole), rel=1e-5)
    assert len(checkpoints(folder)) == 1


def test_a_second_run_in_the_folder_is_refused(data: Path, tmp_path: Path):
    folder, refusals = tmp_path / "run", []

    def second() -> None:
        try:
            train_tiny(tiny_config(), data, folder)
        except TrainError as error:
            refusals.append(str(error))

    def start() -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    assert train_tiny(tiny_config(), data, folder, Told(5, start)).finished
    assert refusals == [f"another process is training in {folder}: wait for it, or use a new folder"]


def test_a_loss_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "run"
    begin = Checkpoints._begin

    def slowly(self: Checkpoints, partial: Path) -> None:
        """Longer than a step, so that the bad step comes while the one before is being written."""
        time.sleep(0.5)
        begin(self, partial)

    monkeypatch.setattr(Checkpoints, "_begin", slowly)
    config = tiny_config(
        train__learning_rate=1e30, train__min_learning_rate=0, train__warmup_steps=20, train__checkpoint_every=1
    )
    with pytest.raises(TrainError) as stopped:
        train_tiny(config, data, folder)
    message = str(stopped.value)
    step = len(losses(folder)) + 1
    assert f"at step {step} (sequences {4 * (step - 1)} to {4 * step - 1} with seed 42)" in message
    assert f"last good checkpoint is {checkpoints(folder)[-1]}" in message
    assert checkpoints(folder)[-1].name == f"step-{step - 1:09d}"
    assert all(math.isfinite(loss) for loss in losses(folder))


def test_a_validation_loss_that_is_not_finite_stops_the_run(data: Path, tmp_path: Path):
    """One step at a rate that overflows: its own loss is finite, that of the weights after it is not."""
    config = tiny_config(
        train__learning_rate=3e38, train__min_learning_rate=0, train__warmup_steps=0, train__tokens=4 * 32
    )
    with pytest.raises(TrainError, match=r"validation loss is (nan|inf) at step 1 \(sequences 0 to 3 with seed 42\)"):
        train_tiny(config, data, tmp_path / "run")
    assert not (tmp_path / "run" / run_folder.SUMMARY).exists()
    assert checkpoints(tmp_path / "run") == []


def truncate(checkpoint: Path) -> None:
    file = next((checkpoint / "optimizer").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def alter(checkpoint: Path) -> None:
    file = next((checkpoint / "weights").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove(checkpoint: Path) -> None:
    next((checkpoint / "weights").glob("*.safetensors")).unlink()


def empty_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text("")


def manifest_of_nothing(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": {}}')
    shutil.rmtree(checkpoint / "weights")


def manifest_of_another_form(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").write_text('{"files": []}')


def foreign_weights(checkpoint: Path) -> None:
    """PyTorch would read these over the true ones."""
    file = next((checkpoint / "weights").glob("*.safetensors"))
    shutil.copyfile(file, file.with_name("zzz.safetensors"))


def test_a_stray_file_is_no_damage(whole: Path, tmp_path: Path):
    """A file manager's, say. What PyTorch would not read does no harm."""
    copy = shutil.copytree(checkpoints(whole)[-1], tmp_path / "copy")
    (copy / ".DS_Store").touch()
    assert damage(copy) == []


HARMS = truncate, alter, remove, empty_manifest, manifest_of_nothing, manifest_of_another_form, foreign_weights


@pytest.fixture(scope="module")
def interrupted(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    train_tiny(tiny_config(), data, folder, Told(13, terminate))
    return folder


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_a_damaged_checkpoint_is_set_aside(data: Path, whole: Path, interrupted: Path, tmp_path: Path, harm: Any):
    folder = shutil.copytree(interrupted, tmp_path / "run")
    before, last = checkpoints(folder)[-2:]
    assert (before.name, last.name) == ("step-000000012", "step-000000014")
    harm(last)
    with pytest.raises(TrainError, match=f"{last.name} is damaged"):
        open_model(folder)
    to_the_end = harm is truncate
    told = Told() if to_the_end else Told(13, terminate)
    assert train_tiny(tiny_config(), data, folder, told).finished == to_the_end
    assert f"checkpoint {last} is damaged" in told.said[0]
    assert told.said[1] == f"resumed from {before}"
    assert last.with_name(last.name + ".damaged").is_dir()
    if to_the_end:
        assert metrics(folder) == metrics(whole)


def test_all_checkpoints_damaged(data: Path, whole: Path, tmp_path: Path):
    folder = tmp_path / "run"
    train_tiny(tiny_config(), data, folder, Told(9, terminate))
    for checkpoint in checkpoints(folder):
        truncate(checkpoint)
    train_tiny(tiny_config(), data, folder)
    assert metrics(folder) == metrics(whole)


def test_a_batch_that_does_not_cut(data: Path):
    with pytest.raises(ConfigError, match=r"global_batch=4 must be at least train.micro_batch=2 × 3"):
        check_batch(tiny_config(), 3)


def copy_of(data: Path, folder: Path) -> Path:
    return Path(shutil.copytree(data, folder))


def test_bad_data_is_refused_at_the_start(data: Path, tmp_path: Path):
    cut = copy_of(data, tmp_path / "cut")
    file = cut / read_index(cut).train[0].file
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{file} is truncated"):
        train_tiny(tiny_config(), cut, tmp_path / "run")

    high = copy_of(data, tmp_path / "high")
    file = high / read_index(high).train[0].file
    content = bytearray(file.read_bytes())
    content[10:12] = (300).to_bytes(2, "little")
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file} has token 300 at position 5, outside model.vocab_size=257"):
        train_tiny(tiny_config(), high, tmp_path / "run")

    other = copy_of(data, tmp_path / "other")
    train_bpe(iter(["some text"]), 258).save(other / TOKENIZER)
    with pytest.raises(DataError, match=f"{other / TOKENIZER} is not the tokenizer"):
        train_tiny(tiny_config(), other, tmp_path / "run")

    with pytest.raises(TrainError, match=f"{data / INDEX}: .* 257 tokens, more than model.vocab_size=256"):
        train_tiny(tiny_config(model__vocab_size=256), data, tmp_path / "run")
    assert not (tmp_path / "run" / run_folder.CHECKPOINTS).exists()


def test_data_altered_between_start_and_resumption(data: Path, tmp_path: Path):
    mine, folder = copy_of(data, tmp_path / "mine"), tmp_path / "run"
    train_tiny(tiny_config(), mine, folder, Told(5, terminate))
    file = mine / read_index(mine).train[0].file
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=f"{file} was altered"):
        train_tiny(tiny_config(), mine, folder)

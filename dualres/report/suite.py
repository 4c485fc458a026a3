"""The runs of a suite: every scale, method, learning rate and seed with the same data order and budget."""

import signal
import subprocess
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.loading import load_config, short_name
from dualres.config.schema import Config, ConfigError
from dualres.data.shards import read_index
from dualres.model.decoder import build_decoder
from dualres.train.engines.build import engine_name
from dualres.train.loop import check_batch, check_vocabulary
from dualres.train.metrics import METRICS, read_rows
from dualres.train.run_folder import SUMMARY, check_config, check_data, has_started, read_summary

BASE = "standard"  # what the others are compared with


class Cell(NamedTuple):
    """One run."""

    scale: str  # name or path
    residual: str  # name or path
    seed: int
    learning_rate: float | None  # None: the scale's

    @property
    def method(self) -> str:
        """How the residual is called in tables."""
        return short_name(self.residual)

    @property
    def name(self) -> str:
        """The run's folder."""
        rate = "" if self.learning_rate is None else f"-lr{self.learning_rate:g}"
        return f"{short_name(self.scale)}-{self.method}{rate}-seed{self.seed}"

    def overrides(self) -> list[str]:
        """Seed and rate; the schedule still ends at a tenth."""
        rate = self.learning_rate
        rates = [] if rate is None else [f"train.learning_rate={rate!r}", f"train.min_learning_rate={rate / 10!r}"]
        return [f"train.seed={self.seed}", *rates]


@dataclass(frozen=True)
class Matrix:
    """What a suite runs and where."""

    cells: tuple[Cell, ...]
    data: Path
    out: Path
    overrides: tuple[str, ...] = ()
    processes: int = 1
    device: str | None = None

    def config(self, cell: Cell) -> Config:
        """The experiment of one run."""
        return load_config(cell.scale, cell.residual, [*self.overrides, *cell.overrides()])


class Result(NamedTuple):
    """A finished run."""

    cell: Cell
    summary: dict[str, Any]
    curve: tuple[tuple[int, float], ...]  # tokens, training loss
    validation: tuple[tuple[int, float], ...]  # tokens, validation loss


def cells(
    pairs: Sequence[tuple[str, str]], seeds: Sequence[int], rates: Sequence[float | None] = (None,)
) -> tuple[Cell, ...]:
    """Every (scale, residual) with every seed and rate, seed by seed: of an early look, the first seed is whole."""
    return tuple(Cell(scale, residual, seed, rate) for seed in seeds for rate in rates for scale, residual in pairs)


def check(matrix: Matrix) -> None:
    """Refuse configs that differ from those of runs that have started, and runs that would share a folder."""
    names = [cell.name for cell in matrix.cells]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two runs of the suite are called {name}: give files of different names, each once")
    for cell in matrix.cells:
        config = matrix.config(cell)
        if has_started(matrix.out / cell.name):
            check_config(matrix.out / cell.name, config)


def check_start(matrix: Matrix) -> None:
    """Refuse before the first run what would stop a later one, and other data than those of finished runs."""
    left = [cell for cell in matrix.cells if not (matrix.out / cell.name / SUMMARY).exists()]
    if not left:
        return
    index = read_index(matrix.data)
    for cell in matrix.cells:
        if has_started(matrix.out / cell.name):
            check_data(matrix.out / cell.name, matrix.data, index)
    for cell in left:
        config = matrix.config(cell)
        check_batch(config, matrix.processes)
        engine_name(config, matrix.processes)
        check_vocabulary(config, matrix.data, index)
        try:
            build_decoder(config.model, config.residual, device="meta")
        except ConfigError as error:
            raise ConfigError(f"{cell.name}: {error}") from None


def run_all(matrix: Matrix, say: Callable[[str], None]) -> list[Cell]:
    """Run what is not finished yet, one after the other, each in a process of its own. -> those that failed"""
    failed = []
    for number, cell in enumerate(matrix.cells, start=1):
        folder = matrix.out / cell.name
        title = f"run {number}/{len(matrix.cells)}  {cell.name}"
        if (folder / SUMMARY).exists():
            say(f"{title}: finished before")
            continue
        say(title)
        code = _run(matrix, cell, folder)
        if code != 0:
            failed.append(cell)
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            say(f"{cell.name} {how}; the others go on")
        elif not (folder / SUMMARY).exists():
            raise KeyboardInterrupt  # it was asked to stop, and has saved
    return failed


def results(matrix: Matrix) -> list[Result]:
    """Those that are finished."""
    there = [cell for cell in matrix.cells if (matrix.out / cell.name / SUMMARY).exists()]
    return [_result(cell, matrix.out / cell.name) for cell in there]


def _run(matrix: Matrix, cell: Cell, folder: Path) -> int:
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={matrix.processes}"]
    command = [sys.executable, *(many if matrix.processes > 1 else []), "-m", "dualres", "train"]
    command += [cell.scale, cell.residual, "--data", str(matrix.data), "--out", str(folder)]
    command += ["--device", matrix.device] if matrix.device else []
    for override in (*matrix.overrides, *cell.overrides()):
        command += ["--set", override]
    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(number: int, frame: types.FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(command)
        if stopped:
            process.terminate()
        code = process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches the run too: let it save
        if process is not None:
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped:
        raise KeyboardInterrupt
    return code


def _result(cell: Cell, folder: Path) -> Result:
    rows = read_rows(folder / METRICS)
    tokens = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
    curve = tuple((row["tokens"], row["loss"]) for row in rows if "loss" in row)
    validation = tuple((tokens[row["step"]], row["validation_loss"]) for row in rows if "validation_loss" in row)
    return Result(cell, read_summary(folder), curve, validation)

"""The runs of a suite: every scale, method, learning rate and seed with the same data order and budget."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config import Config
from dualres.experiment import load_config, short_name
from dualres.train.errors import TrainError
from dualres.train.log import METRICS, read_rows
from dualres.train.run import CONFIG, SUMMARY, check_same

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
class Plan:
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
    scale: str,
    residuals: Sequence[str],
    seeds: Sequence[int],
    rates: Sequence[float | None] = (None,),
) -> tuple[Cell, ...]:
    """All of them, seed by seed, so that an early look compares like with like."""
    return tuple(Cell(scale, residual, seed, rate) for seed in seeds for rate in rates for residual in residuals)


def check(plan: Plan) -> None:
    """Refuse before the first run what would fail in a later one."""
    names = [cell.name for cell in plan.cells]
    for name in names:
        if names.count(name) > 1:
            raise TrainError(f"two runs of the suite are called {name}: give residual files of different names, once")
    for cell in plan.cells:
        config = plan.config(cell)
        folder = plan.out / cell.name
        if (folder / CONFIG).exists():
            check_same(folder, config)


def run_all(plan: Plan, say: Callable[[str], None]) -> list[Cell]:
    """Run what is not finished yet, one after the other, each in a process of its own. -> those that failed"""
    failed = []
    for number, cell in enumerate(plan.cells, start=1):
        folder = plan.out / cell.name
        title = f"run {number}/{len(plan.cells)}  {cell.name}"
        if (folder / SUMMARY).exists():
            say(f"{title}: finished before")
            continue
        say(title)
        code = _run(plan, cell, folder)
        if code != 0:
            failed.append(cell)
            say(f"{cell.name} failed with exit code {code}; its message stands above, the others go on")
        elif not (folder / SUMMARY).exists():
            raise KeyboardInterrupt  # it was asked to stop, and has saved
    return failed


def results(plan: Plan) -> list[Result]:
    """Those that are finished."""
    there = [cell for cell in plan.cells if (plan.out / cell.name / SUMMARY).exists()]
    return [_result(cell, plan.out / cell.name) for cell in there]


def _run(plan: Plan, cell: Cell, folder: Path) -> int:
    many = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={plan.processes}"]
    command = [sys.executable, *(many if plan.processes > 1 else []), "-m", "dualres", "train"]
    command += [cell.scale, cell.residual, "--data", str(plan.data), "--out", str(folder)]
    command += ["--device", plan.device] if plan.device else []
    for override in (*plan.overrides, *cell.overrides()):
        command += ["--set", override]
    process = subprocess.Popen(command)
    try:
        return process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches the run too: let it save
        process.wait()
        raise


def _result(cell: Cell, folder: Path) -> Result:
    rows = read_rows(folder / METRICS)
    tokens = {row["step"]: row["tokens"] for row in rows if "tokens" in row}
    curve = tuple((row["tokens"], row["loss"]) for row in rows if "loss" in row)
    validation = tuple((tokens[row["step"]], row["validation_loss"]) for row in rows if "validation_loss" in row)
    return Result(cell, json.loads((folder / SUMMARY).read_text(encoding="utf-8")), curve, validation)

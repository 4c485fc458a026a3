"""Run folders as they are given: those of `dualres train`, or folders that hold some."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import Config, ConfigError
from dualres.train.metrics import METRICS, read_rows
from dualres.train.run_folder import CONFIG, SUMMARY, is_run, read_config, read_description, read_summary
from dualres.util.errors import TrainError

Curve = tuple[tuple[int, float], ...]  # tokens, value


class Run(NamedTuple):
    """What a run's folder holds. One that has taken no step has empty curves."""

    folder: Path
    config: Config
    data: Path  # the prepared folder, as it was called when the run began
    content: str  # the same for the same data
    start: str | None  # the model whose weights it began with
    summary: dict[str, Any] | None  # None: not finished
    training: Curve  # loss
    validation: Curve  # loss
    router: Curve  # load-balancing loss; empty without experts

    @property
    def seed(self) -> int:
        """Of the data order and the start."""
        return self.config.train.seed


def find_runs(given: Sequence[Path]) -> list[Run]:
    """The runs of all folders, each once, in the given order; those inside of a folder by name."""
    folders: dict[Path, Path] = {}
    for path in given:
        for folder in _run_folders(path):
            folders.setdefault(folder.resolve(), folder)
    return [_read(folder) for folder in folders.values()]


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"RUN {path} {what}: give the folder of a run or of a suite")
    inside = [path] if _has_metrics(path) else sorted(folder for folder in path.iterdir() if _has_metrics(folder))
    if not inside:
        raise ConfigError(
            f"RUN {path} is no run and holds none: a run has {CONFIG} and {METRICS}, which `dualres train` and "
            "`dualres suite` write; give such a folder, or the one that holds them"
        )
    return inside


def _has_metrics(folder: Path) -> bool:
    return is_run(folder) and (folder / METRICS).is_file()


def _read(folder: Path) -> Run:
    described = read_description(folder)
    rows = read_rows(folder / METRICS)
    if not rows and (folder / METRICS).stat().st_size > 0:
        raise _damaged(folder, "no row of it is whole")
    tokens = {_number(folder, row, "step"): int(_number(folder, row, "tokens")) for row in rows if "loss" in row}

    def curve(key: str) -> Curve:
        return tuple((_at(folder, row, tokens), _number(folder, row, key)) for row in rows if key in row)

    return Run(
        folder,
        read_config(folder),
        Path(str(described["data"].get("folder", ""))),
        str(described["data"].get("content", "")),
        described.get("start"),
        _summary(folder) if (folder / SUMMARY).exists() else None,
        curve("loss"),
        curve("validation_loss"),
        curve("router_loss"),
    )


def _summary(folder: Path) -> dict[str, Any]:
    summary = read_summary(folder)
    if not isinstance(summary.get("validation_loss"), int | float):
        raise TrainError(
            f"{folder / SUMMARY} has no validation_loss: remove it and give the run's command again, which writes it "
            "anew"
        )
    return {"tokens_per_second": None, "peak_memory": None, **summary}


def _at(folder: Path, row: Any, tokens: dict[float, int]) -> int:
    step = _number(folder, row, "step")
    if step not in tokens:
        raise _damaged(folder, f"step {step:g} has no training loss")
    return tokens[step]


def _number(folder: Path, row: Any, key: str) -> float:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _damaged(folder, f"{key} is {value!r} in {row}")
    return value


def _damaged(folder: Path, what: str) -> TrainError:
    return TrainError(f"{folder / METRICS} cannot be read ({what}): restore it, or leave this run out")

"""Reads run folders."""

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
    """The contents of a run folder; the curves are empty before the first step."""

    folder: Path
    config: Config
    data: Path  # path of the prepared data when the run started
    content: str  # hash of the data
    start: str | None  # model of the initial weights (train --from)
    summary: dict[str, Any] | None  # None: not finished
    training: Curve  # loss
    validation: Curve  # loss
    router: Curve  # load-balancing loss; empty without experts

    @property
    def seed(self) -> int:
        return self.config.train.seed


def find_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of all folders, each once, in the order of `paths`; runs inside a folder are sorted by name."""
    folders: dict[Path, Path] = {}
    for path in paths:
        for folder in _run_folders(path):
            folders.setdefault(folder.resolve(), folder)
    return [read_run(folder) for folder in folders.values()]


def read_run(folder: Path) -> Run:
    description = read_description(folder)
    rows = read_rows(folder / METRICS)
    if not rows and (folder / METRICS).stat().st_size > 0:
        raise _damaged(folder, "it has no complete row")
    tokens = {_number(folder, row, "step"): int(_number(folder, row, "tokens")) for row in rows if "loss" in row}

    def curve(key: str) -> Curve:
        points = []
        for row in (row for row in rows if key in row):
            step = _number(folder, row, "step")
            if step not in tokens:
                raise _damaged(folder, f"step {step:g} has no training loss")
            points.append((tokens[step], _number(folder, row, key)))
        return tuple(points)

    return Run(
        folder,
        read_config(folder),
        Path(str(description["data"].get("folder", ""))),
        str(description["data"].get("content", "")),
        description.get("start"),
        _summary(folder) if (folder / SUMMARY).exists() else None,
        curve("loss"),
        curve("validation_loss"),
        curve("router_loss"),
    )


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise ConfigError(f"RUN {path} {problem}: pass the folder of a run or of a suite")
    found = [path] if _has_metrics(path) else sorted(filter(_has_metrics, path.iterdir()))
    if not found:
        raise ConfigError(
            f"RUN {path} is not a run and contains none: `dualres train` and `dualres suite` write runs, with {CONFIG} "
            f"and {METRICS}; pass such a folder or its parent"
        )
    return found


def _has_metrics(folder: Path) -> bool:
    return is_run(folder) and (folder / METRICS).is_file()


def _summary(folder: Path) -> dict[str, Any]:
    summary = read_summary(folder)
    if not isinstance(summary.get("validation_loss"), int | float):
        raise TrainError(f"{folder / SUMMARY} has no validation_loss: delete it and rerun the training command")
    return {"tokens_per_second": None, "peak_memory": None, **summary}


def _number(folder: Path, row: Any, key: str) -> float:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _damaged(folder, f"{key} is {value!r} in {row}")
    return value


def _damaged(folder: Path, reason: str) -> TrainError:
    return TrainError(f"{folder / METRICS} cannot be read ({reason}): restore it, or remove this run from the command")

"""Reads run folders, and groups runs that differ only in their seed, with names for tables and curves."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.config.schema import Config, ConfigError
from dualres.report.reproduce import Origin, differing, origin, settings
from dualres.residual.registry import explicit, resolve
from dualres.train.metrics import METRICS, read_rows
from dualres.train.provenance import Start, read_starts
from dualres.train.run_folder import CONFIG, SUMMARY, is_run, may_change, read_config, read_description, read_summary
from dualres.util.errors import TrainError

BASE = "standard"  # the method that the others are compared with
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
    starts: tuple[Start, ...] = ()  # those that computed some of its steps; empty if an older version trained it

    @property
    def seed(self) -> int:
        return self.config.train.seed


class Group(NamedTuple):
    """Runs that differ only in their seed."""

    scale: str
    residual: str  # name of the shipped config, or the method
    runs: tuple[Run, ...]  # one per seed, sorted
    settings: Mapping[str, Any]  # everything that the results depend on, except the seed
    options: str = ""  # what distinguishes it from groups of the same scale and residual
    within: str = ""  # what distinguishes its setting from others of its scale
    origin: Origin | None = None

    @property
    def method(self) -> str:
        """The name of the group within its scale."""
        return ", ".join(filter(None, (self.residual, self.options)))

    @property
    def heading(self) -> str:
        """Scale and setting; groups under one heading are comparable."""
        return ", ".join(filter(None, (self.scale, self.within)))

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def setting(self) -> dict[str, Any]:
        """Equal for groups that differ only in their residual, which are comparable."""
        return {key: value for key, value in self.settings.items() if not key.startswith("residual.")}

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.summary is not None)

    @property
    def unfinished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.summary is None)

    @property
    def losses(self) -> dict[int, float]:
        """Final validation loss of every finished run, by seed."""
        return {run.seed: run.summary["validation_loss"] for run in self.runs if run.summary is not None}

    @property
    def is_standard(self) -> bool:
        return self.config.residual.method == BASE

    @property
    def is_shipped(self) -> bool:
        """Whether its residual equals the shipped config of that name in every option."""
        return self.origin is not None and not self.origin.changes("residual")


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
        _effective(read_starts(folder)),
    )


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[Run]]:
    """Groups by scale, `standard` first; and the runs omitted because they repeat a seed of their group."""
    data = data_names(runs)
    alike: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.summary is None):  # prefers the finished one of two runs with one seed
        alike.setdefault(repr(_settings(run, data)), {}).setdefault(run.seed, run)
    groups = []
    for seeds in alike.values():
        members = tuple(seeds[seed] for seed in sorted(seeds))
        config, shipped = members[0].config, origin(members[0].config)
        names = _scale(config, shipped), _residual(config, shipped)
        groups.append(Group(*names, members, _settings(members[0], data), origin=shipped))
    order = {run.folder: number for number, run in enumerate(runs)}
    scales = list(dict.fromkeys(group.scale for group in sorted(groups, key=lambda g: order[g.runs[0].folder])))
    groups.sort(key=lambda g: (scales.index(g.scale), not g.is_standard, order[g.runs[0].folder]))
    used = {run.folder for group in groups for run in group.runs}
    return [_distinguished(group, groups) for group in groups], [run for run in runs if run.folder not in used]


def data_names(runs: Sequence[Run]) -> dict[str, str]:
    """Names of the data folders by content, so that a moved folder keeps its name."""
    names: dict[str, str] = {}
    for run in runs:
        name = run.data.name if run.data.name not in names.values() else f"{run.data.name} ({run.content[:8]})"
        names.setdefault(run.content, name)
    return names


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


def _effective(starts: Sequence[Start]) -> tuple[Start, ...]:
    """Without those whose steps a later start computed again, because no checkpoint had been saved."""
    return tuple(start for at, start in enumerate(starts) if all(later.step > start.step for later in starts[at + 1 :]))


def _number(folder: Path, row: Any, key: str) -> float:
    value = row.get(key) if isinstance(row, dict) else None
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise _damaged(folder, f"{key} is {value!r} in {row}")
    return value


def _damaged(folder: Path, reason: str) -> TrainError:
    return TrainError(f"{folder / METRICS} cannot be read ({reason}): restore it, or remove this run from the command")


def _distinguished(group: Group, groups: Sequence[Group]) -> Group:
    """Name what distinguishes a group within its scale and residual, and its setting within its scale."""
    scale = [other for other in groups if other.scale == group.scale]
    options = differing(group.settings, [other.settings for other in scale if other.residual == group.residual])
    return group._replace(options=options, within=differing(group.setting, [other.setting for other in scale]))


def _settings(run: Run, data: Mapping[str, str]) -> dict[str, Any]:
    # Spell out every option of the residual, so that a default equals its explicit value.
    residual = explicit(run.config.residual, 2 * run.config.model.layers)
    everything = settings(dataclasses.replace(run.config, residual=residual))
    kept = {key: everything[key] for key in everything if not may_change(key, run.config)}
    return {**kept, "data": data[run.content], "start": run.start, "train.seed": None}


def _scale(config: Config, shipped: Origin | None) -> str:
    if shipped is not None and not shipped.changes("model"):
        return shipped.scale
    experts = "" if config.model.moe is None else f", {config.model.moe.experts} experts"
    return f"{config.model.layers}×{config.model.width}{experts}"


def _residual(config: Config, shipped: Origin | None) -> str:
    if shipped is not None and not shipped.changes("residual"):
        return shipped.residual
    streams = resolve(config.residual).get("streams")
    return config.residual.method if streams is None else f"{config.residual.method}-{streams}"

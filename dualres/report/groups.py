"""Groups runs that differ only in their seed, and names the groups for tables and curves."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dualres.config.schema import Config
from dualres.report.reproduce import Origin, differing, origin, settings
from dualres.report.runs import Run
from dualres.residual.registry import explicit, resolve
from dualres.train.run_folder import may_change

BASE = "standard"  # the method that the others are compared with


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

"""Runs as groups: one per method and setting, over its seeds, with the names that tables and curves give it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from dualres.config.schema import Config
from dualres.report.config_settings import differing, settings, written_out
from dualres.report.reproduce_command import Origin, origin
from dualres.report.runs import Run
from dualres.report.suite import BASE
from dualres.residual.registry import resolve
from dualres.train.run_folder import MAY_CHANGE


class Group(NamedTuple):
    """Runs that differ in their seeds only."""

    scale: str
    residual: str  # the method, called as the config that ships is
    options: str  # what tells it from others of its scale and residual
    settings: dict[str, Any]  # all that its results depend on, but the seed
    within: str  # what tells the setting from others of its scale
    runs: tuple[Run, ...]  # by seed, each once
    origin: Origin | None

    @property
    def method(self) -> str:
        """How it is called among the groups of its scale."""
        return ", ".join(filter(None, (self.residual, self.options)))

    @property
    def config(self) -> Config:
        """That of the first seed."""
        return self.runs[0].config

    @property
    def setting(self) -> dict[str, Any]:
        """The same for groups that differ in their residual only, which can be compared."""
        return {key: value for key, value in self.settings.items() if not key.startswith("residual.")}

    @property
    def finished(self) -> tuple[Run, ...]:
        """Those with a result."""
        return tuple(run for run in self.runs if run.summary is not None)

    @property
    def unfinished(self) -> tuple[Run, ...]:
        """Those without one yet."""
        return tuple(run for run in self.runs if run.summary is None)

    @property
    def place(self) -> str:
        """Scale and setting, in words: groups of one place can be compared."""
        return ", ".join(filter(None, (self.scale, self.within)))

    @property
    def is_standard(self) -> bool:
        """Whether the others may be compared with it."""
        return self.config.residual.method == BASE

    @property
    def is_shipped(self) -> bool:
        """Whether its residual is, to the last option, the config that it is called by."""
        return self.origin is not None and not self.origin.changes("residual")


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[Run]]:
    """Groups by scale, `standard` first; and the runs that repeat a seed of their group, which are left out."""
    data = data_names(runs)
    alike: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: run.summary is None):  # of two with one seed, the finished one
        alike.setdefault(repr(_settings(run, data)), {}).setdefault(run.seed, run)
    groups = [_group(tuple(seeds[seed] for seed in sorted(seeds)), data) for seeds in alike.values()]
    given = {run.folder: number for number, run in enumerate(runs)}
    scales = list(dict.fromkeys(group.scale for group in sorted(groups, key=lambda g: given[g.runs[0].folder])))
    groups.sort(key=lambda g: (scales.index(g.scale), not g.is_standard, given[g.runs[0].folder]))
    counted = {run.folder for group in groups for run in group.runs}
    return _told_apart(groups), [run for run in runs if run.folder not in counted]


def data_names(runs: Sequence[Run]) -> dict[str, str]:
    """The prepared folders' names by content, which stays the same where a folder is moved."""
    names: dict[str, str] = {}
    for run in runs:
        name = run.data.name if run.data.name not in names.values() else f"{run.data.name} ({run.content[:8]})"
        names.setdefault(run.content, name)
    return names


def _group(runs: tuple[Run, ...], data: Mapping[str, str]) -> Group:
    config, own = runs[0].config, _settings(runs[0], data)
    found = origin(config)
    return Group(_scale(config, found), _residual(config, found), "", own, "", runs, found)


def _told_apart(groups: Sequence[Group]) -> list[Group]:
    """With names: what tells groups of one scale and residual apart, and what tells settings of one scale apart."""
    options = _names(groups, lambda g: (g.scale, g.residual), lambda g: g.settings)
    within = _names(groups, lambda g: (g.scale,), lambda g: g.setting)
    return [
        group._replace(options=own, within=place) for group, own, place in zip(groups, options, within, strict=True)
    ]


def _names(
    groups: Sequence[Group], key: Callable[[Group], tuple[str, ...]], of: Callable[[Group], dict[str, Any]]
) -> list[str]:
    """What tells each group apart from those with the same key."""
    found = []
    for group in groups:
        others = [other for other in groups if key(other) == key(group)]
        found.append(differing([of(other) for other in others])[others.index(group)])
    return found


def _settings(run: Run, data: Mapping[str, str]) -> dict[str, Any]:
    # Routers balance each micro-batch, so its size is part of what a sparse model learns.
    free = MAY_CHANGE if run.config.model.moe is None else MAY_CHANGE - {"train.micro_batch"}
    everything = settings(written_out(run.config))
    kept = {key: everything[key] for key in everything if key not in free and not key.startswith("train.parallel.")}
    return {**kept, "data": data[run.content], "start": run.start, "train.seed": None}


def _scale(config: Config, found: Origin | None) -> str:
    if found is not None and not found.changes("model"):
        return found.scale
    experts = "" if config.model.moe is None else f", {config.model.moe.experts} experts"
    return f"{config.model.layers}×{config.model.width}{experts}"


def _residual(config: Config, found: Origin | None) -> str:
    if found is not None and not found.changes("residual"):
        return found.residual
    streams = resolve(config.residual).get("streams")
    return config.residual.method if streams is None else f"{config.residual.method}-{streams}"

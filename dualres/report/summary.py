"""Sentences about the runs for the page: what was compared, on what hardware, what is missing."""

import functools
from collections import Counter
from collections.abc import Sequence

from dualres.config.validation import choices
from dualres.report.comparison import ComparisonRow
from dualres.report.groups import BASE, Group
from dualres.report.runs import Run
from dualres.util.progress import plural

DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
listed = functools.partial(choices, conjunction="and")


def title(groups: Sequence[Group]) -> str:
    return f"Residual pathways at {listed(dict.fromkeys(group.scale for group in groups))}"


def lead(groups: Sequence[Group]) -> str:
    """One sentence: methods, scales, tokens, data, seeds."""
    scales = dict.fromkeys(group.scale for group in groups)
    return f"This page compares residual methods: {listed(_scale(scale, groups) for scale in scales)}."


def caveats(
    groups: Sequence[Group], compared: Sequence[ComparisonRow], repeated: Sequence[Run], idle: Sequence[Run]
) -> list[str]:
    """Notes that a reader needs to judge the numbers; `idle` runs have not taken a step."""
    notes = [_machines([run for group in groups for run in group.finished])]
    if len({group.heading for group in groups}) < len(groups):
        notes.append(
            "Under one heading of the tables, methods differ only in the residual: data, data order, budget and "
            "learning rate are equal, and the rate is not tuned per method."
        )
    headings = dict.fromkeys(row.group.heading for row in compared)
    with_base = {row.group.heading for row in compared if row.is_base}
    if without := [heading for heading in headings if heading not in with_base]:
        notes.append(f"There is no finished run of {BASE} at {listed(without)} to compare with.")
    if unfinished := [_progress(run) for group in groups for run in group.unfinished]:
        notes.append(f"Unfinished, shown as curves but not in the tables: {listed(unfinished)}.")
    if idle:
        notes.append(f"No step taken yet: {listed(run.folder.name for run in idle)}.")
    if repeated:
        notes.append(f"Omitted because config and seed repeat another run: {listed(run.folder for run in repeated)}.")
    return notes


def _scale(scale: str, groups: Sequence[Group]) -> str:
    members = [group for group in groups if group.scale == scale]
    tokens = listed(f"{count:,}" for count in sorted({group.config.train.tokens for group in members}))
    data = listed(dict.fromkeys(group.settings["data"] for group in members))
    seeds = sorted({run.seed for group in members for run in group.runs})
    return f"{len(members)} at {scale} ({tokens} tokens of {data}, seed{'s' if len(seeds) > 1 else ''} {listed(seeds)})"


def _progress(run: Run) -> str:
    return f"{run.folder.name} ({run.training[-1][0]:,} of {run.config.train.tokens:,} tokens)"


def _machines(runs: Sequence[Run]) -> str:
    """The devices of the finished runs; a summary has no more about the machine."""
    summaries = [run.summary for run in runs if run.summary is not None]
    if not summaries:
        return "No run is finished, so the hardware is not known yet."
    kinds = Counter((s.get("device", "unknown"), s.get("processes", 1), s.get("threads")) for s in summaries)
    texts = []
    for (device, processes, threads), count in kinds.items():
        parts = [DEVICES.get(device, device), *([f"{processes:,} processes"] if processes > 1 else [])]
        parts += [plural(threads, "thread")] if threads and device == "cpu" else []
        texts.append(f"{plural(count, 'run')} on {', '.join(parts)}")
    gpu = "" if any(device == "cuda" for device, _, _ in kinds) else " No run used a GPU."
    return f"Measured: {listed(texts)}.{gpu}"

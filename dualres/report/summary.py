"""What the page says of itself: what was compared, how far to trust it, what is missing."""

from collections import Counter
from collections.abc import Iterable, Sequence

from dualres.report.comparison import Compared
from dualres.report.groups import Group
from dualres.report.runs import Run
from dualres.report.suite import BASE

DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
INTERVALS = (
    "± is half of a 95% interval over seeds, by Student's t; one seed has none. The difference is paired: runs of one "
    "seed have the same data order and the same start, so most of the noise cancels.",
    "Bold is the lowest mean of its scale, by the printed digits; where intervals overlap it is no finding. Of many "
    "95% intervals, one in twenty misses by chance.",
    "Tokens/s and peak memory are means over runs made one after the other, whatever else the machine did: no "
    "benchmark. × is relative to standard, and left out where engine, processes, device or threads differ. Memory is "
    "all that the process held on a CPU, what PyTorch allocated on a GPU.",
    "Parameters are counted with the vocabulary, each tensor once.",
)
CURVES = (
    "Lines are means over seeds of the training loss, bands the range over seeds, points the validation losses of the "
    "single runs. Each value is a moving average over the steps before it"
)
ROUTERS = (
    "The load-balancing loss of the routers, mean over layers: 1.0, the dotted line, is the same load for every "
    "expert. Lines are means over seeds, bands their range. Each value is a moving average over the steps before it"
)
HOW = (
    "Point at a chart, touch it, or go to it by keyboard and use the arrow keys to read values; the buttons beside it "
    "hide and show methods, and the vertical axis follows. Without a crosshair the table has the last values."
)
ALIKE = (
    "Under one heading of the tables, methods differ in nothing but the residual: data and their order, budget and "
    "learning rate are the same, the rate not being tuned for each."
)
PAPERS = (
    "The columns called the paper's are its published numbers, of its own scales, data and budget; they are not "
    "reproduced here. Losses of other scales and data cannot be compared as such; the differences beneath them show "
    "whether methods stand in the same order."
)


def title(groups: Sequence[Group]) -> str:
    """Of the page."""
    return f"Residual pathways at {listed(dict.fromkeys(group.scale for group in groups))}"


def compared_in_words(groups: Sequence[Group]) -> str:
    """One sentence: methods, scales, tokens, data, seeds."""
    scales = dict.fromkeys(group.scale for group in groups)
    return f"Compared here: residual methods, {listed(_at(scale, groups) for scale in scales)}."


def honesty(
    groups: Sequence[Group], compared: Sequence[Compared], repeated: Sequence[Run], idle: Sequence[Run]
) -> list[str]:
    """What a reader must know before believing a number; `idle` runs have taken no step."""
    notes = [_machines([run for group in groups for run in group.finished])]
    if len({group.place for group in groups}) < len(groups):
        notes.append(ALIKE)
    places = dict.fromkeys(made.group.place for made in compared)
    if without := [place for place in places if not any(m.is_base and m.group.place == place for m in compared)]:
        notes.append(f"There is no finished run of {BASE} at {listed(without)} to compare with.")
    if unfinished := [_so_far(run) for group in groups for run in group.unfinished]:
        notes.append(f"Not finished, so with a curve and not in the tables: {listed(unfinished)}.")
    if idle:
        notes.append(f"No step taken yet: {listed(run.folder.name for run in idle)}.")
    if repeated:
        others = listed(run.folder for run in repeated)
        notes.append(f"Left out, as config and seed are those of another run: {others}.")
    return notes


def listed(texts: Iterable[object]) -> str:
    """'a, b and c'"""
    *others, last = map(str, texts)
    return f"{', '.join(others)} and {last}" if others else last


def _at(scale: str, groups: Sequence[Group]) -> str:
    there = [group for group in groups if group.scale == scale]
    tokens = listed(f"{count:,}" for count in sorted({group.config.train.tokens for group in there}))
    data = listed(dict.fromkeys(group.settings["data"] for group in there))
    seeds = sorted({run.seed for group in there for run in group.runs})
    return (
        f"{len(there)} at {scale} ({tokens} tokens of {data}, {'seeds' if len(seeds) > 1 else 'seed'} {listed(seeds)})"
    )


def _so_far(run: Run) -> str:
    return f"{run.folder.name} ({run.training[-1][0]:,} of {run.config.train.tokens:,} tokens)"


def _machines(runs: Sequence[Run]) -> str:
    """Devices of the finished runs; the summary of a run has no more about the machine."""
    summaries = [run.summary for run in runs if run.summary is not None]
    if not summaries:
        return "No run is finished, so on what they run is not known."
    kinds = Counter((s.get("device", "unknown"), s.get("processes", 1), s.get("threads")) for s in summaries)
    texts = []
    for (device, processes, threads), count in kinds.items():
        parts = [DEVICES.get(device, device), *([_plural(processes, "process")] if processes > 1 else [])]
        parts += [_plural(threads, "thread")] if threads and device == "cpu" else []
        texts.append(f"{_plural(count, 'run')} on {', '.join(parts)}")
    gpu = "" if any(device == "cuda" for device, _, _ in kinds) else " No run used a GPU."
    return f"Measured in {listed(texts)}.{gpu}"


def _plural(count: int, word: str) -> str:
    ending = "" if count == 1 else "es" if word.endswith("ss") else "s"
    return f"{count:,} {word}{ending}"

"""The page: one self-contained HTML file that loads nothing from the network, from `templates/`."""

import base64
import functools
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError
from markupsafe import Markup

from dualres.analyze.analysis import FOLDER, Analysis, read_analysis
from dualres.config.schema import ConfigError
from dualres.config.validation import choices
from dualres.evaluate.tables import REFERENCE, TableCell
from dualres.report import charts, comparison, samples
from dualres.report.charts import Chart
from dualres.report.reproduce import as_yaml, command
from dualres.report.runs import BASE, Group, Run, find_runs, group_runs
from dualres.train.provenance import Start
from dualres.util.curves import COLORS, WINDOW
from dualres.util.optional_dependencies import available, missing
from dualres.util.progress import Show, duration, plural, silent
from dualres.util.templates import environment
from dualres.util.version import VERSION

TEMPLATES = Path(__file__).parent / "templates"
HALF_PAGE = 400.0  # points: wider figures would shrink at half the page's width
MIXABLE = {  # what should be equal for a fair comparison, and what it is called
    "dualres": "dualres versions",
    "code": "commits",
    "torch": "PyTorch versions",
    "python": "Python versions",
    "processor": "processors",
}
DEVICES = {"cpu": "a CPU", "cuda": "a GPU"}
EVALUATION, EVALUATIONS = "report.json", "evaluations"  # of `dualres evaluate`, and the folder that is searched for it
RERUN = "rerun the same dualres evaluate command; it reuses existing results."
_CURVES = " ".join(f"--c{number}: {color.lower()};" for number, color in enumerate(COLORS))
_PALETTE = f":root {{ {_CURVES} }}\n{(TEMPLATES / 'palette.css').read_text(encoding='utf-8')}"
STYLE = _PALETTE + (TEMPLATES / "page.css").read_text(encoding="utf-8")
FIGURE_STYLE = f"<style>{_PALETTE}svg {{ fill: var(--c0); }}</style>"  # matplotlib leaves out the color of black text
THEMED = {  # colors of a figure that change with the page's
    **{color.lower(): f"var(--c{number})" for number, color in enumerate(COLORS)},
    "#ffffff": "var(--background)",
    "#666666": "var(--muted)",
    "#cccccc": "var(--rule)",
}
FILES = "chart.js", "csv.js", "page.js", "refresh.js"
SCRIPT = "".join((TEMPLATES / name).read_text(encoding="utf-8") for name in FILES)

listed = functools.partial(choices, conjunction="and")


def make_page(
    folders: Sequence[Path],
    evaluation_folders: Sequence[Path],
    command: str,
    *,
    with_samples: bool = True,
    refresh: float | None = None,
    show: Show = silent,
) -> str:
    """The page of runs, suites and their evaluations; the footer shows the command.

    `refresh`: the page reloads itself after so many seconds.
    """
    runs = find_runs(folders)
    groups, repeated = group_runs([run for run in runs if run.training])
    if not groups:
        raise ConfigError(
            f"no run in {listed(folders)} has taken a step yet: pass one that has, or try again in a moment"
        )
    rows = comparison.compare(groups)
    by_heading: dict[str, list[comparison.ComparisonRow]] = {}
    for row in rows:
        by_heading.setdefault(row.group.heading, []).append(row)
    losses, routers = charts.loss_charts(groups), charts.router_charts(groups)
    evaluations = _evaluation_tables(evaluation_folders, folders)
    scales = dict.fromkeys(group.scale for group in groups)
    texts = samples.samples(groups, show) if with_samples else []
    starts = [(run, start) for group in groups for run in group.runs for start in run.starts]
    contents = {  # anchor, and name of the section's template -> heading
        "comparison": "Comparison",
        "curves": "Loss curves",
        **({"routers": "Router balance"} if routers else {}),
        **({"evaluation": "Perplexity and zero-shot"} if any(evaluations) else {}),
        "paper": "Comparison with the paper",
        "analyses": "Analyses",
        **({"samples": "Samples of text"} if texts else {}),
        "runs": "Runs and machines",
        "configs": "Configs and commands",
    }
    page = _environment().get_template("page.html")
    text = page.render(
        title=f"Residual pathways at {listed(scales)}",
        scales=[_scale(scale, [group for group in groups if group.scale == scale]) for scale in scales],
        machines=_machines([run for group in groups for run in group.finished]),
        comparable=len({group.heading for group in groups}) < len(groups),
        without_base=[heading for heading, each in by_heading.items() if not any(row.is_base for row in each)],
        unfinished=[_progress(run) for group in groups for run in group.unfinished],
        idle=[run.folder.name for run in runs if not run.training],
        repeated=[run.folder for run in repeated],
        sections=contents,
        base=BASE,
        comparison=by_heading,
        losses=losses,
        routers=routers,
        paper_window=str(WINDOW),
        evaluations=evaluations,
        paper_tables=comparison.paper_tables(rows),
        analyses=_analyses(groups),
        samples=texts,
        prompt=samples.PROMPT,
        sample_command=samples.COMMAND,
        starts=starts,
        mixed=_mixed([start for _, start in starts]),
        unrecorded=[
            run.folder.name for group in groups for run in group.runs if not run.starts or run.starts[0].step > 0
        ],
        groups=groups,
        refresh=None if refresh is None else f"{refresh:g}",
        version=VERSION,
        command=command,
        comparison_data=_embedded(comparison.as_columns(rows)),
        chart_data=_embedded([charts.as_data(chart) for chart in (*losses, *routers)]),
        style=Markup(STYLE),
        script=Markup(SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    )
    return text.encode(errors="replace").decode()  # a folder's name may not be valid text


def _evaluation_tables(requested: Sequence[Path], runs: Sequence[Path]) -> list[Markup]:
    """The tables of the requested evaluations, and of those inside the folders of runs and suites."""
    for folder in requested:
        if not (folder / EVALUATION).is_file():
            raise ConfigError(f"--evaluation {folder} has no {EVALUATION}: pass the --out folder of `dualres evaluate`")
    folders = [*requested, *(path / EVALUATIONS for path in runs if (path / EVALUATIONS / EVALUATION).is_file())]
    template, tables = _environment().get_template("tables.html"), []
    for file in {(folder / EVALUATION).resolve(): folder / EVALUATION for folder in folders}.values():
        try:
            data = json.loads(file.read_text(encoding="utf-8"))
            rows = [row for each in data.get("tables", ()) for row in (*each["rows"], *each["reference"])]
            if other := {key for row in rows for cell in row for key in cell} - {*TableCell._fields}:
                raise ValueError(f"a cell has {listed(sorted(other))}")
            tables.append(Markup(template.render(data=data, file=str(file), reference=REFERENCE, again=RERUN)))
        except (ValueError, TypeError, KeyError, AttributeError, TemplateError) as error:
            raise ConfigError(f"{file} cannot be read ({error!r}): {RERUN}") from None
    return tables


@functools.cache
def _environment() -> Environment:
    templates = environment(TEMPLATES, html.escape)
    templates.filters |= {
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
        "command": _command,
        "listed": listed,
        "svg": lambda chart: charts.as_svg(chart) if available("matplotlib") else "",
        "themed": _themed,
        "took": _took,
        "windows": _windows,
        "yaml": as_yaml,
    }
    templates.tests["wide"] = _is_wide
    return templates


def _scale(scale: str, groups: Sequence[Group]) -> str:
    """The methods of a scale, with tokens, data and seeds."""
    tokens = listed(f"{count:,}" for count in sorted({group.config.train.tokens for group in groups}))
    data = listed(dict.fromkeys(group.settings["data"] for group in groups))
    seeds = sorted({run.seed for group in groups for run in group.runs})
    return f"{len(groups)} at {scale} ({tokens} tokens of {data}, seed{'s' if len(seeds) > 1 else ''} {listed(seeds)})"


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


def _mixed(starts: Sequence[Start]) -> list[str]:
    """What differs among the starts, with the values."""
    found = []
    for key, what in MIXABLE.items():
        values = dict.fromkeys(str(value)[:40] for start in starts if (value := getattr(start, key)) is not None)
        if len(values) > 1:
            found.append(f"{what} ({listed(values)})")
    return found


def _took(start: Start) -> str:
    try:
        began, ended = (datetime.fromisoformat(str(time)) for time in (start.began, start.ended))
        return duration((ended - began).total_seconds())
    except (TypeError, ValueError):  # it still runs, failed, or its record was edited
        return "—"


def _windows(panels: Sequence[Chart]) -> str:
    """The windows of the charts' moving averages."""
    return listed(dict.fromkeys(f"{chart.window} steps at {chart.title}" for chart in panels))


def _analyses(groups: Sequence[Group]) -> dict[str, Any]:
    """The figures of `dualres analyze` side by side, with the first analyzed seed of each method."""
    several = len({group.scale for group in groups}) > 1
    analyses: dict[str, Analysis] = {}
    shown = []
    for group in groups:
        name = f"{group.scale} {group.method}" if several else group.method
        for run in group.runs:
            if (analysis := read_analysis(run.folder / FOLDER)) is not None:
                analyses[name] = analysis
                shown.append(f"{name} (seed {run.seed}, {run.folder.name})")
                break
    protocols = list(dict.fromkeys(analysis.protocol() for analysis in analyses.values()))
    figures: dict[str, Any] = {"sections": [], "missing": ""}
    if analyses and available("matplotlib"):
        from dualres.analyze.figures import sections

        figures["sections"] = sections(analyses)
    elif analyses:
        figures["missing"] = missing("matplotlib", "plots", "drawing them")
    return {"shown": shown, "protocols": protocols, **figures}


def _is_wide(svg: str) -> bool:
    size = re.search(r'<svg[^>]* width="([\d.]+)pt"', svg)
    return size is not None and float(size[1]) > HALF_PAGE


def _themed(svg: str) -> str:
    """The figure with a style that follows light and dark; a browser that ignores it shows a light figure."""
    colored = re.sub("#[0-9a-f]{6}", lambda color: THEMED.get(color[0], color[0]), svg)
    return re.sub("<svg[^>]*>", lambda tag: tag[0] + FIGURE_STYLE, colored, count=1)


def _command(group: Group) -> str:
    """The command that reproduces the first seed of a group with an origin."""
    first = group.runs[0]
    assert group.origin is not None
    return command(group.origin, str(first.data), (first.summary or {}).get("processes", 1))


def _embedded(data: Any) -> Markup:
    """Data for the page's script. It contains no `<`, so nothing in it can end the element or start another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", "\\u003c"))

"""The page: one self-contained HTML file that loads nothing from the network."""

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from dualres.analyze.analysis import FOLDER, Analysis, read_analysis
from dualres.analyze.figures import Panel, Section, sections
from dualres.config.schema import ConfigError
from dualres.report import charts, comparison, evaluations, paper_losses, summary
from dualres.report.charts import Chart
from dualres.report.groups import Group, group_runs
from dualres.report.html import Markup, code, embedded, fill, join, notes, read_template, svg_image, tag
from dualres.report.reproduce import as_yaml, command
from dualres.report.runs import find_runs
from dualres.util.curves import COLORS, WINDOW
from dualres.util.version import VERSION

HALF_PAGE = 576.0  # points: wider figures are not legible at half the page's width
_PALETTE = " ".join(f"--c{number}: {color.lower()};" for number, color in enumerate(COLORS))
STYLE = f":root {{ {_PALETTE} }}\n{read_template('page.css')}"
SCRIPT = read_template("chart.js") + read_template("page.js")


def make_page(folders: Sequence[Path], evaluation_folders: Sequence[Path], command: str) -> str:
    """The page of runs, suites and their evaluations; the footer shows the command."""
    runs = find_runs(folders)
    groups, repeated = group_runs([run for run in runs if run.training])
    if not groups:
        raise ConfigError(
            f"no run in {summary.listed(folders)} has taken a step yet: pass one that has, or try again in a moment"
        )
    rows = comparison.compare(groups)
    losses, routers = charts.loss_charts(groups), charts.router_charts(groups)
    parts = [  # anchor, title, content; empty sections are omitted
        ("comparison", "Comparison", _comparison(rows)),
        ("curves", "Loss curves", _charts("curves", losses)),
        ("routers", "Router balance", _charts("routers", routers) if routers else Markup()),
        ("evaluation", "Perplexity and zero-shot", evaluations.as_html(evaluation_folders, folders)),
        ("paper", "Comparison with the paper", _paper(rows)),
        ("analyses", "Analyses", _analyses(groups)),
        ("configs", "Configs and commands", join(*(_config(group) for group in groups))),
    ]
    page = fill(
        "page",
        title=summary.title(groups),
        lead=summary.lead(groups),
        notes=notes(summary.caveats(groups, rows, repeated, [run for run in runs if not run.training])),
        contents=join(*(tag("li", tag("a", title, href=f"#{name}")) for name, title, body in parts if body)),
        sections=join(*(tag("section", tag("h2", title, id=name), body) for name, title, body in parts if body)),
        version=VERSION,
        command=command,
        data=embedded([charts.as_data(chart) for chart in (*losses, *routers)], "charts"),
        style=Markup(STYLE),
        script=Markup(SCRIPT),
        script_hash=base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode(),
    )
    return page.encode(errors="replace").decode()  # a folder's name may not be valid text


def _comparison(rows: Sequence[comparison.ComparisonRow]) -> Markup:
    if not rows:
        return tag("p", "No run is finished yet; the curves show progress so far.", class_="notice")
    return fill("comparison", table=comparison.as_html(rows))


def _charts(template: str, panels: Sequence[Chart]) -> Markup:
    windows = summary.listed(dict.fromkeys(f"{chart.window} steps at {chart.title}" for chart in panels))
    figures = []
    for chart in panels:
        title = f"{chart.title}: {chart.unit}"
        figures.append(fill("chart", name=chart.name, title=title, static=svg_image(charts.as_svg(chart), title)))
    return fill(template, windows=windows, paper=str(WINDOW), figures=join(*figures))


def _paper(rows: Sequence[comparison.ComparisonRow]) -> Markup:
    tables = paper_losses.as_html(rows)
    if not tables:
        return tag("p", "None of these runs has a counterpart in the paper's loss tables.")
    return fill("paper", tables=join(*tables))


def _analyses(groups: Sequence[Group]) -> Markup:
    """The figures of `dualres analyze` side by side, with the first analyzed seed of each method."""
    several = len({group.scale for group in groups}) > 1
    analyses: dict[str, Analysis] = {}
    used = []
    for group in groups:
        name = f"{group.scale} {group.method}" if several else group.method
        for run in group.runs:
            if (analysis := read_analysis(run.folder / FOLDER)) is not None:
                analyses[name] = analysis
                used.append(f"{name} (seed {run.seed}, {run.folder.name})")
                break
    if not analyses:
        return tag("p", "No run has been analyzed: run ", code("dualres analyze RUN…"), ", then recreate this page.")
    protocols = list(dict.fromkeys(analysis.protocol() for analysis in analyses.values()))
    how = f"Protocol: {protocols[0]}."
    if len(protocols) > 1:
        how = f"Protocols differ, so compare with care: {'; or '.join(protocols)}."
    runs = f"Each method is shown by one run, its first analyzed seed: {summary.listed(used)}."
    return join(tag("p", runs), tag("p", how), *(analysis_section(section) for section in sections(analyses)))


def analysis_section(section: Section) -> Markup:
    return join(
        tag("h3", section.title, id=f"analysis-{section.name}"),
        tag("p", section.text),
        tag("div", *(_figure(section.title, panel) for panel in section.panels), class_="panels"),
    )


def _figure(title: str, panel: Panel) -> Markup:
    size = re.search(r'<svg[^>]* width="([\d.]+)pt"', panel.svg)
    wide = {"class_": "wide"} if size is not None and float(size[1]) > HALF_PAGE else {}
    return tag("figure", svg_image(panel.svg, f"{title}, {panel.method}"), tag("figcaption", panel.method), **wide)


def _config(group: Group) -> Markup:
    seeds = ", ".join(str(run.seed) for run in group.runs)
    return fill(
        "config",
        method=group.method,
        scale=group.scale,
        seeds=f"{'seed' if len(group.runs) == 1 else 'seeds'} {seeds}",
        made_by=_reproduce(group),
        seed=str(group.runs[0].seed),
        yaml=as_yaml(group.config),
    )


def _reproduce(group: Group) -> Markup:
    first = group.runs[0]
    if first.start is not None:
        return tag("p", "Training started from the weights of ", code(first.start), " (--from): no command is shown.")
    if group.origin is None:
        return tag("p", "This config was not built from shipped configs, so there is no command to show.")
    processes = (first.summary or {}).get("processes", 1)
    others = ", ".join(str(run.seed) for run in group.runs[1:])
    more = f" Other seeds: train.seed={others}." if others else ""
    return join(
        tag("p", f"Command for seed {first.seed}, without --out.{more}"),
        tag("pre", code(command(group.origin, str(first.data), processes))),
    )

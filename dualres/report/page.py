"""The page: one HTML file with everything in it, which asks no network for anything."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dualres.config.schema import ConfigError
from dualres.report import analyses, charts, configs, evaluations, summary
from dualres.report.charts import Chart
from dualres.report.comparison import Compared, compare_groups
from dualres.report.evaluations import Evaluation, find_evaluations
from dualres.report.groups import Group, group_runs
from dualres.report.html import Markup, code, embedded, join, notes, svg_image, tag
from dualres.report.paper_losses import paper_losses
from dualres.report.runs import find_runs
from dualres.report.static_chart import still
from dualres.report.tables import comparison
from dualres.util.curves import WINDOW
from dualres.util.version import VERSION

_HERE = Path(__file__).parent
STYLE = (_HERE / "page.css").read_text(encoding="utf-8")
SCRIPT = "".join((_HERE / name).read_text(encoding="utf-8") for name in ("chart.js", "page.js"))


class Part(NamedTuple):
    """A section of the page."""

    name: str  # of its place in the page
    title: str
    body: Markup


def make_page(given: Sequence[Path], evaluated: Sequence[Path], command: str) -> str:
    """The page of the given runs and suites and of what was evaluated; `command` made it."""
    runs = find_runs(given)
    groups, repeated = group_runs([run for run in runs if run.training])
    if not groups:
        raise ConfigError(
            f"no run has taken a step yet in {summary.listed(given)}: give one that has, or wait a moment and give the "
            "same command again"
        )
    compared = compare_groups(groups)
    losses, routers = charts.loss_charts(groups), charts.router_charts(groups)
    parts = [
        Part("comparison", "Comparison", _comparison(compared)),
        Part("curves", "Loss curves", _charts(losses, summary.CURVES, summary.HOW)),
        *([Part("routers", "Router balance", _charts(routers, summary.ROUTERS))] if routers else []),
        *_evaluations(find_evaluations(evaluated, given)),
        Part("paper", "Beside the paper", _paper(compared)),
        Part("analyses", "Analyses", _analyses(groups)),
        Part("configs", "Configs and commands", join(*(configs.as_html(group) for group in groups))),
    ]
    idle = [run for run in runs if not run.training]
    head = join(
        tag("h1", summary.title(groups)),
        tag("p", summary.compared_in_words(groups), class_="lead"),
        notes(summary.honesty(groups, compared, repeated, idle)),
        tag(
            "nav",
            tag("ul", *(tag("li", tag("a", part.title, href=f"#{part.name}")) for part in parts)),
            aria_label="Contents",
        ),
    )
    sections = [tag("section", tag("h2", part.title, id=part.name), part.body) for part in parts]
    footer = tag("footer", tag("p", f"Made with dualres {VERSION} by ", code(command)))
    data = embedded([charts.as_data(chart) for chart in (*losses, *routers)], "charts")
    return _document(summary.title(groups), join(tag("header", head), tag("main", *sections), footer, data))


def _document(title: str, body: Markup) -> str:
    script = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{script}'; base-uri 'none'; "
        "form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(STYLE)),
    )
    page = tag("html", head, tag("body", body, tag("script", Markup(SCRIPT))), lang="en")
    return f"<!doctype html>\n{page}\n".encode(errors="replace").decode()  # a folder's name may hold what is no text


def _comparison(compared: Sequence[Compared]) -> Markup:
    if not compared:
        return tag("p", "No run is finished yet: the curves are of what there is.", class_="notice")
    return join(comparison(compared), notes(summary.INTERVALS))


def _charts(drawn: Sequence[Chart], what: str, how: str = "") -> Markup:
    windows = summary.listed(dict.fromkeys(f"{chart.window} at {chart.title}" for chart in drawn))
    figures = [
        tag(
            "figure",
            tag("figcaption", f"{chart.title}: {chart.unit}"),
            tag("noscript", tag("div", svg_image(still(chart), f"{chart.title}: {chart.unit}"), class_="still")),
            class_="chart",
            id=chart.name,
            data_title=f"{chart.title}: {chart.unit}",
        )
        for chart in drawn
    ]
    hint = tag("p", how, class_="script") if how else ""
    return join(tag("p", f"{what}: {windows} (the paper's is of {WINDOW})."), hint, *figures)


def _evaluations(found: Sequence[Evaluation]) -> list[Part]:
    body = join(*(evaluations.as_html(each) for each in found))
    return [Part("evaluation", "Perplexity and zero-shot", body)] if found else []


def _paper(compared: Sequence[Compared]) -> Markup:
    tables = paper_losses(compared)
    return (
        join(tag("p", summary.PAPERS), *tables)
        if tables
        else tag("p", "None of these runs has a counterpart in the paper's loss tables.")
    )


def _analyses(groups: Sequence[Group]) -> Markup:
    sections, used, ways = analyses.analyses(groups)
    if not sections:
        return tag(
            "p", "No run has an analysis yet: ", code("dualres analyze RUN…"), " makes them, then make this page again."
        )
    runs = f"One run of each method is shown, the first seed that has an analysis: {summary.listed(used)}."
    how = f"Looked at: {ways[0]}."
    if len(ways) > 1:
        how = f"They were not all looked at in the same way, so compare with care: {'; or '.join(ways)}."
    return join(tag("p", runs), tag("p", how), *(analyses.as_html(section) for section in sections))

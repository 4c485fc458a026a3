"""The pictures of `dualres analyze`, method beside method."""

import re
from collections.abc import Sequence

from dualres.analyze.analysis import FOLDER, Analysis, read_analysis
from dualres.analyze.figures import Panel, Section, sections
from dualres.report.groups import Group
from dualres.report.html import Markup, join, svg_image, tag

HALF_A_PAGE = 576.0  # points: a wider picture would not be readable in half a page's width


def analyses(groups: Sequence[Group]) -> tuple[list[Section], list[str], list[str]]:
    """The sections of all methods that have an analysis, which run each is of, and the ways they were looked at."""
    several = len({group.scale for group in groups}) > 1
    found: dict[str, Analysis] = {}
    used = []
    for group in groups:
        there = ((run, read_analysis(run.folder / FOLDER)) for run in group.runs)
        first = next(((run, analysis) for run, analysis in there if analysis is not None), None)
        if first is not None:
            name = f"{group.scale} {group.method}" if several else group.method
            found[name] = first[1]
            used.append(f"{name} (seed {first[0].seed}, {first[0].folder.name})")
    ways = list(dict.fromkeys(analysis.protocol() for analysis in found.values()))
    return sections(found) if found else [], used, ways


def as_html(section: Section) -> Markup:
    """Pictures side by side, each called by its method."""
    panels = [_figure(section.title, panel) for panel in section.panels]
    return join(
        tag("h3", section.title, id=f"analysis-{section.name}"),
        tag("p", section.text),
        tag("div", *panels, class_="panels"),
    )


def _figure(title: str, panel: Panel) -> Markup:
    size = re.search(r'<svg[^>]* width="([\d.]+)pt"', panel.svg)
    wide = {"class_": "wide"} if size is not None and float(size[1]) > HALF_A_PAGE else {}
    return tag("figure", svg_image(panel.svg, f"{title}, {panel.method}"), tag("figcaption", panel.method), **wide)

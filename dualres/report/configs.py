"""How each method was run: the command that makes it, and the whole config."""

from dualres.report.config_settings import as_yaml
from dualres.report.groups import Group
from dualres.report.html import Markup, code, join, tag
from dualres.report.reproduce_command import command


def as_html(group: Group) -> Markup:
    """Folded, under the method's name."""
    return tag(
        "details",
        tag("summary", code(group.method), f" at {group.scale}, {_seeds(group)}"),
        _made_by(group),
        tag("p", f"The config of seed {group.runs[0].seed}:"),
        tag("pre", code(as_yaml(group.config)), class_="yaml"),
    )


def _made_by(group: Group) -> Markup:
    first = group.runs[0]
    if first.start is not None:
        return tag(
            "p",
            "It began with the weights of ",
            code(first.start),
            ", which train --from takes: no command is shown, for where that model lies is not known.",
        )
    if group.origin is None:
        return tag("p", "No configs that ship with dualres lead to it: only its config is shown.")
    processes = (first.summary or {}).get("processes", 1)
    others = [str(run.seed) for run in group.runs[1:]]
    more = f" The other seeds: train.seed={', '.join(others)}." if others else ""
    return join(
        tag("p", f"The command of seed {first.seed}, without its --out.{more}"),
        tag("pre", code(command(group.origin, str(first.data), processes))),
    )


def _seeds(group: Group) -> str:
    seeds = ", ".join(str(run.seed) for run in group.runs)
    return f"{'seed' if len(group.runs) == 1 else 'seeds'} {seeds}"

"""`dualres params` and `dualres describe`: models that are counted and not run."""

import argparse
import json
import sys
from typing import Any

from dualres.commands import arguments
from dualres.config.loading import load_config
from dualres.plan import describe, parameter_tables


def add(commands: Any) -> None:
    """Declare both."""
    sub = arguments.command(
        commands,
        "params",
        "the paper's parameter tables, ours beside them",
        "Build every model of the paper's two parameter tables on the meta device, count its parameters,\n"
        "and compare with the printed numbers to the last digit. Exits with 1 if any differs.",
        "",
    )
    sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sub.set_defaults(command=_params)

    sub = arguments.command(
        commands,
        "describe",
        "structure, parameters, flops and residual state of one model",
        "Show how SCALE on RESIDUAL is built and what it costs. Builds it on the meta device, so it takes\n"
        "seconds and no memory, whatever the scale.",
        f"{arguments.known()}{arguments.OVERRIDES}\nexample:\n  dualres describe 1b dar-block",
    )
    arguments.experiment(sub)
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")
    sub.set_defaults(command=_describe)


def _params(arguments: argparse.Namespace) -> int:
    rows = parameter_tables.compare()
    wrong = [row for row in rows if not row.agrees]
    if arguments.json:
        print(json.dumps({"agrees": not wrong, "rows": [parameter_tables.as_data(row) for row in rows]}, indent=2))
    else:
        print(parameter_tables.as_text(rows))
    for row in wrong:
        print(
            f"dualres: {row.scale} {row.residual}, {row.column}: the paper prints {row.paper}, "
            f"we count {row.ours:,} ({row.printed})",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _describe(arguments: argparse.Namespace) -> int:
    described = describe.describe(load_config(arguments.scale, arguments.residual, arguments.set))
    if arguments.json:
        print(json.dumps(described, indent=2))
    else:
        print(describe.as_text(described, f"{arguments.scale} × {arguments.residual}"))
    return 0

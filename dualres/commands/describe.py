"""`dualres describe`: what a model is made of and what it costs."""

import argparse
import json
from typing import Any

from dualres.commands import arguments


def add(commands: Any) -> None:
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


def _describe(given: argparse.Namespace) -> int:
    from dualres.config.loading import load_config
    from dualres.plan import describe

    described = describe.describe(load_config(given.scale, given.residual, given.set))
    if given.json:
        print(json.dumps(described, indent=2))
    else:
        print(describe.as_text(described, f"{given.scale} × {given.residual}"))
    return 0

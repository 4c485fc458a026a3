"""Show the structure, parameters, FLOPs and residual state of one model.

Show how SCALE on RESIDUAL is built and what it costs. The model is built on the meta device, which takes
seconds and no memory at any scale.
"""

import argparse
import json

from dualres.commands import arguments
from dualres.config.loading import load_config

EPILOG = f"{arguments.KNOWN}{arguments.OVERRIDES}\nexample:\n  dualres describe 1b dar-block"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_experiment(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(given: argparse.Namespace) -> int:
    from dualres.plan import describe

    described = describe.describe(load_config(given.scale, given.residual, given.set))
    if given.json:
        print(json.dumps(described, indent=2))
    else:
        print(describe.as_text(described, f"{given.scale} × {given.residual}"))
    return 0

"""Show the structure, parameters, FLOPs and residual state of one model.

Show how SCALE with RESIDUAL is built and what it costs. The model is built on the meta device, which takes
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


def run(args: argparse.Namespace) -> int:
    from dualres.plan import describe

    description = describe.describe(load_config(args.scale, args.residual, args.set))
    if args.json:
        print(json.dumps(description, indent=2))
    else:
        print(describe.as_text(description, f"{args.scale} × {args.residual}"))
    return 0

"""Turn an exported model into a run folder.

The inverse of export: recreate a run folder RUN from FOLDER, which `dualres export` wrote from a run.
RUN gets one checkpoint: the weights, without optimizer state.
To continue training: dualres train SCALE RESIDUAL --from FOLDER
"""

import argparse
from pathlib import Path

from dualres.commands import arguments

EPILOG = "example:\n  dualres import models/nano-dar runs/nano-dar-again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="an exported model")
    parser.add_argument("run", metavar="RUN", type=Path, help="new folder to write")
    arguments.add_plugin(parser)


def run(args: argparse.Namespace) -> int:
    from dualres.hub.export import import_run

    import_run(args.folder, args.run)
    print(f"wrote {args.run}: {args.folder} as a run")
    return 0

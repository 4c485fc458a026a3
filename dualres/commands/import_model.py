"""Turn an exported model into a run's folder.

The inverse of export: write the model of FOLDER, which `dualres export` made from a run, to RUN as that
run with one checkpoint, its weights and no optimizer state.
To continue training: dualres train SCALE RESIDUAL --from FOLDER
"""

import argparse
from pathlib import Path

EPILOG = "example:\n  dualres import models/nano-dar runs/nano-dar-again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="an exported model")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder to write; new")


def run(given: argparse.Namespace) -> int:
    from dualres.hub.export import import_run

    import_run(given.folder, given.run)
    print(f"{given.folder} is written to {given.run} as a run")
    return 0

"""`dualres import`: turn an exported model into a run again."""

import argparse
from pathlib import Path
from typing import Any

from dualres.commands import arguments


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "import",
        "turn an exported model into a run's folder",
        "The inverse of export: write the model of FOLDER, which `dualres export` made from a run, to RUN as that\n"
        "run with one checkpoint, its weights and no optimizer state.\n"
        "To continue training: dualres train SCALE RESIDUAL --from FOLDER",
        "example:\n  dualres import models/nano-dar runs/nano-dar-again",
    )
    sub.add_argument("folder", metavar="FOLDER", type=Path, help="an exported model")
    sub.add_argument("run", metavar="RUN", type=Path, help="the folder to write; new")
    sub.set_defaults(command=_import)


def _import(given: argparse.Namespace) -> int:
    arguments.hush()
    from dualres.hub.export import import_run

    import_run(given.folder, given.run)
    print(f"{given.folder} is written to {given.run} as a run")
    return 0

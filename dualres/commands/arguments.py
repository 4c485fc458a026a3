"""Arguments that several commands share: the scale, residual and overrides that define an experiment."""

import argparse
from typing import Any

from dualres.config.loading import names
from dualres.util.optional_dependencies import need

OVERRIDES = """
overrides:
  --set changes any key of the scale and residual files and may be repeated:
    --set residual.branches_per_block=8 --set residual.share_parameters=false --set model.layers=12
  docs/reference/configuration.md lists every key.
"""


def command(commands: Any, name: str, help: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A command whose help keeps its line breaks."""
    return commands.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        help=help,
        description=description,
        epilog=epilog,
    )


def known() -> str:
    """The scales and residuals that ship with dualres."""
    return f"scales:     {', '.join(names('scale'))}\nresiduals:  {', '.join(names('residual'))}\n"


def experiment(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("scale", metavar="SCALE", help="name of a scale, or path to a YAML file")
    sub.add_argument("residual", metavar="RESIDUAL", help="name of a residual, or path to a YAML file")
    overrides(sub)


def overrides(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change a key; may be repeated")


def checkpoint(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--checkpoint", choices=("last", "best"), default="last", help="of a run (default last)")


def hush() -> None:
    """Silence the progress bars and warnings of transformers."""
    logging = need("transformers", "hub", "this command").utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()

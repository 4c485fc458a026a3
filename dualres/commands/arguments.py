"""Arguments shared by several commands, and their checks."""

import argparse
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualres.config.loading import names, shortened_warmup
from dualres.config.schema import Config, ConfigError

if TYPE_CHECKING:
    from dualres.train.preflight import Check


def listed(title: str, entries: Sequence[str]) -> str:
    """A line of a help text that lists names, wrapped."""
    line = f"{title + ':':12}{', '.join(entries)}"
    return textwrap.fill(line, 100, subsequent_indent=" " * 12, break_on_hyphens=False) + "\n"


RESIDUALS = listed("residuals", names("residual"))
KNOWN = listed("scales", names("scale")) + RESIDUALS
OVERRIDES = """
overrides:
  --set changes any key of the scale and residual files and may be repeated:
    --set residual.branches_per_block=8 --set residual.share_parameters=false --set model.layers=12
"""


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """SCALE, RESIDUAL and --set, which define an experiment."""
    parser.add_argument("scale", metavar="SCALE", help="name of a scale, or path to a YAML file")
    parser.add_argument("residual", metavar="RESIDUAL", help="name of a residual method, or path to a YAML file")
    add_overrides(parser)
    add_plugin(parser)


def add_plugin(parser: argparse.ArgumentParser) -> None:
    """--plugin, which `cli` reads."""
    help = "import a module that registers a residual method; may be repeated"
    parser.add_argument("--plugin", metavar="MODULE", action="append", default=[], help=help)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change a key; may be repeated")


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    help = "which checkpoint of a run (default last)"
    parser.add_argument("--checkpoint", choices=("last", "best"), default="last", help=help)


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", metavar="D", default="auto", help="cpu, cuda, cuda:N (default auto: a GPU if any)")


def add_force(parser: argparse.ArgumentParser) -> None:
    help = "start even if a check fails, such as that of disk space or memory"
    parser.add_argument("--force", action="store_true", help=help)


def check_device(args: argparse.Namespace) -> None:
    """Raise if --device names a GPU that this machine does not have. Call this before any other work."""
    if args.device not in (None, "auto", "cpu"):
        from dualres.train.device import pick_device

        pick_device(args.device)


def check_positive(args: argparse.Namespace, *options: str) -> None:
    """Raise if a number is not positive and finite; None, for an omitted option, passes."""
    for option in options:
        value = getattr(args, option)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{option.replace('_', '-')} {value} is not positive and finite: use a positive number")


def warmup_checks(config: Config, args: argparse.Namespace) -> "list[Check]":
    """A note if the run is too short for the warmup of its recipe."""
    from dualres.train.preflight import Check

    note = shortened_warmup(config, args.scale, args.set)
    return [] if note is None else [Check("warmup", "note", note)]


def check_seed(args: argparse.Namespace) -> None:
    if not 0 <= args.seed < 2**63:
        raise ConfigError(f"--seed {args.seed}: use a number from 0 to 2^63 - 1")


def parse_models(texts: Sequence[str]) -> dict[str, str]:
    """NAME=PATH or PATH -> paths by the names that tables use, which must differ."""
    models: dict[str, str] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).resolve().name if Path(text).exists() else text.split("/")[-1], text
        name = " ".join(name.split())
        if not name or not path:
            raise ConfigError(f"MODEL {text!r} has no {'path' if name else 'name'}: use NAME=PATH, or PATH")
        if name in models:
            raise ConfigError(f"two models are called {name}, {models[name]} and {path}: use NAME=PATH for one")
        models[name] = path
    return models

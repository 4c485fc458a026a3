"""`dualres report`: one HTML page of runs, for a browser, a phone or paper."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.report.page import make_page
from dualres.util.atomic_files import write_text

DEFAULT_OUT = Path("report.html")


def add(commands: Any) -> None:
    """Declare it."""
    sub = arguments.command(
        commands,
        "report",
        "one HTML page of runs: comparison, curves, evaluations, analyses",
        "Make one page of what the runs found: the comparison with its intervals, loss curves to look into, router\n"
        "balance, the tables of `dualres evaluate`, the paper's losses beside ours, the pictures of `dualres\n"
        "analyze`, and every config with the command that makes it. The file holds all that it shows: it opens from\n"
        "disk, asks no network for anything, and can be sent or printed as it is.",
        "RUN is the folder of a run (of `dualres train`) or one that holds runs (of `dualres suite`).\n"
        "evaluations/report.json in such a folder is found by itself.\n\n"
        "examples:\n"
        "  dualres report suites/nano\n"
        "  dualres report runs/nano-standard runs/nano-dar-block -o compared.html\n"
        "  dualres report suites/nano --evaluation evaluations",
    )
    sub.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs, or of suites")
    sub.add_argument("-o", "--out", metavar="FILE", type=Path, default=DEFAULT_OUT, help=f"default {DEFAULT_OUT}")
    sub.add_argument(
        "--evaluation",
        metavar="DIR",
        type=Path,
        action="append",
        default=[],
        help="an --out folder of `dualres evaluate`; may be repeated",
    )
    sub.set_defaults(command=_report)


def _report(given: argparse.Namespace) -> int:
    if given.out.is_dir():
        raise ConfigError(f"-o {given.out} is a folder: name a file, {given.out / DEFAULT_OUT} say")
    text = make_page(given.runs, given.evaluation, _command(given))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out, text)
    print(f"written: {given.out} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def _command(given: argparse.Namespace) -> str:
    evaluated = [part for folder in given.evaluation for part in ("--evaluation", str(folder))]
    return shlex.join(["dualres", "report", *map(str, given.runs), *evaluated, "-o", str(given.out)])

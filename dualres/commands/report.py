"""`dualres report`: one HTML page about runs, for a browser, a phone or print."""

import argparse
import shlex
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.util.atomic_files import write_text

DEFAULT_OUT = Path("report.html")


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "report",
        "one HTML page about runs: comparison, curves, evaluations, analyses",
        "Make one page of results: the comparison with confidence intervals, interactive loss curves, router balance,\n"
        "the tables of `dualres evaluate`, the paper's losses next to ours, the figures of `dualres analyze`, and\n"
        "every config with the command that reproduces it. The file is self-contained: it loads nothing from the\n"
        "network, and can be mailed or printed.",
        "RUN is the folder of a run (`dualres train`) or a folder of runs (`dualres suite`).\n"
        "evaluations/report.json in such a folder is included automatically.\n\n"
        "examples:\n"
        "  dualres report suites/nano\n"
        "  dualres report runs/nano-standard runs/nano-dar-block -o compared.html\n"
        "  dualres report suites/nano --evaluation evaluations",
    )
    sub.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs or suites")
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
        raise ConfigError(f"-o {given.out} is a folder: name a file, such as {given.out / DEFAULT_OUT}")
    from dualres.report.page import make_page

    text = make_page(given.runs, given.evaluation, _command(given))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(given.out, text)
    print(f"written: {given.out} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0


def _command(given: argparse.Namespace) -> str:
    evaluated = [part for folder in given.evaluation for part in ("--evaluation", str(folder))]
    return shlex.join(["dualres", "report", *map(str, given.runs), *evaluated, "-o", str(given.out)])

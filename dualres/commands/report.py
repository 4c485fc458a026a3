"""Create a one-page HTML report of runs: comparison, curves, evaluations, analyses.

Create a report of one page: the comparison with confidence intervals, interactive loss curves, router balance,
the tables of `dualres evaluate`, the paper's losses next to ours, the figures of `dualres analyze`, and
every config with the command that reproduces it. The file is self-contained: it loads nothing from the
network, and can be emailed or printed.
"""

import argparse
import shlex
from pathlib import Path

from dualres.config.schema import ConfigError
from dualres.util.atomic_files import write_text

DEFAULT_OUT = Path("report.html")
EPILOG = """\
RUN is the folder of a run (`dualres train`) or a folder of runs (`dualres suite`).
evaluations/report.json in such a folder is included automatically.

examples:
  dualres report suites/nano
  dualres report runs/nano-standard runs/nano-dar-block -o compared.html
  dualres report suites/nano --evaluation evaluations
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs or suites")
    add("-o", "--out", metavar="FILE", type=Path, default=DEFAULT_OUT, help=f"output file (default {DEFAULT_OUT})")
    repeated = "an --out folder of `dualres evaluate`; may be repeated"
    add("--evaluation", metavar="DIR", type=Path, action="append", default=[], help=repeated)


def run(args: argparse.Namespace) -> int:
    if args.out.is_dir():
        raise ConfigError(f"-o {args.out} is a folder: use a file name such as {args.out / DEFAULT_OUT}")
    from dualres.report.page import make_page

    options = [part for folder in args.evaluation for part in ("--evaluation", str(folder))]
    command = shlex.join(["dualres", "report", *map(str, args.runs), *options, "-o", str(args.out)])
    text = make_page(args.runs, args.evaluation, command)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(args.out, text)
    print(f"wrote {args.out} ({len(text.encode()) / 1e6:.1f} MB)")
    return 0

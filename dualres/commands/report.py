"""Create a one-page HTML report of runs: comparison, curves, evaluations, analyses.

Create a report of one page: the comparison with confidence intervals, interactive loss curves, router balance,
the tables of `dualres evaluate`, the paper's losses next to ours, the figures of `dualres analyze`, a text
sample of each method, the code and machine of each run, and every config with the command that reproduces it.
The file is self-contained: it loads nothing from the network, and can be emailed or printed.

With --watch the page is updated while runs train, and reloads itself in the browser. Ctrl-C writes it a last time,
without the reload, and exits with 0.
"""

import argparse
import os
import shlex
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.util.atomic_files import partial_of, write_text
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import available, missing
from dualres.util.progress import Progress, say_as

DEFAULT_OUT, DEFAULT_SECONDS = Path("report.html"), 30
WRITE_ERRORS = (ConfigError, DataError, ModelError, TrainError, OSError)
EPILOG = """\
RUN is the folder of a run (`dualres train`) or a folder of runs (`dualres suite`).
evaluations/report.json in such a folder is included automatically.

examples:
  dualres report suites/nano
  dualres report runs/nano-standard runs/nano-dar-block -o compared.html
  dualres report suites/nano --evaluation evaluations
  dualres report suites/nano --watch
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", type=Path, help="folders of runs or suites")
    add("-o", "--out", metavar="FILE", type=Path, default=DEFAULT_OUT, help=f"output file (default {DEFAULT_OUT})")
    repeated = "an --out folder of `dualres evaluate`; may be repeated"
    add("--evaluation", metavar="DIR", type=Path, action="append", default=[], help=repeated)
    add("--no-samples", action="store_true", help="no text samples, which take a few seconds per method")
    update = f"update the page while runs train, every SECONDS (default {DEFAULT_SECONDS}), until Ctrl-C"
    add("--watch", metavar="SECONDS", type=float, nargs="?", const=DEFAULT_SECONDS, help=update)
    arguments.add_plugin(parser)


def run(args: argparse.Namespace) -> int:
    if args.out.is_dir():
        raise ConfigError(f"-o {args.out} is a folder: use a file name such as {args.out / DEFAULT_OUT}")
    arguments.check_positive(args, "watch")
    from dualres.report.page import make_page

    options = [part for folder in args.evaluation for part in ("--evaluation", str(folder))]
    options += ["--no-samples"] if args.no_samples else []
    options += [part for module in args.plugin for part in ("--plugin", module)]
    command = shlex.join(["dualres", "report", *map(str, args.runs), *options, "-o", str(args.out)])
    progress = Progress(args.verbosity, muted=args.watch is not None)  # samples are remembered
    if not available("matplotlib"):
        needed = missing("matplotlib", "plots", "drawing figures")
        Progress(args.verbosity).say(f"{needed}; the page has none of analyses, and curves only where scripts run")

    def write(refresh: float | None) -> None:
        text = make_page(
            args.runs,
            args.evaluation,
            command,
            with_samples=not args.no_samples,
            refresh=refresh,
            show=progress.show,
        )
        progress.end()
        args.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(args.out, text)
        print(f"wrote {args.out} ({len(text.encode()) / 1e6:.1f} MB)", flush=True)

    if args.watch is None:
        write(None)
    else:
        watch([*args.runs, *args.evaluation], args.out, args.watch, write)
    return 0


def watch(folders: Sequence[Path], out: Path, seconds: float, write: Callable[[float | None], None]) -> None:
    """Write the page whenever a file of the folders has changed; the last one, after Ctrl-C, does not reload itself."""
    before, told = None, ""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"updating {out} every {seconds:g} seconds until Ctrl-C", flush=True)
    try:
        while True:
            now = stamps(folders, out)
            if now != before:
                try:
                    write(seconds)
                    before, told = now, ""
                except WRITE_ERRORS as error:  # such as: no run has taken a step yet
                    if str(error) != told:
                        say_as(0, f"{error}; still watching")
                    told = str(error)
            time.sleep(seconds)
    except KeyboardInterrupt:
        try:
            write(None)
        except WRITE_ERRORS:
            if before is None:  # there is no page
                raise


def stamps(folders: Sequence[Path], out: Path) -> dict[str, tuple[int, int]]:
    """Time and size of every file in the folders, except the page."""
    found = {}
    ours = {os.path.realpath(out), os.path.realpath(partial_of(out))}
    for folder in folders:
        for parent, _, files in os.walk(folder):
            for path in (os.path.join(parent, name) for name in files):
                try:
                    status = os.stat(path)
                except OSError:  # it has just been removed
                    continue
                if os.path.realpath(path) not in ours:
                    found[path] = status.st_mtime_ns, status.st_size
    return found

"""The command line: `dualres COMMAND --help` explains each."""

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from dualres import __version__
from dualres.commands import analyze, describe, evaluate, export, generate, plan, prepare, report, suite, train
from dualres.config.schema import ConfigError
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.optional_dependencies import MissingExtraError
from dualres.util.progress import say_as

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = (describe, plan, prepare, train, generate, suite, evaluate, analyze, report, export)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. -> exit code: 0 fine, 1 a check or a run failed, 2 the input was wrong, 130 interrupted"""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError, MissingExtraError, ModelError) as error:
        return _failed(error, 2)
    except TrainError as error:
        return _failed(error, 1)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        remedy = ": free space there and give the same command again" if error.errno in NO_SPACE else ""
        return _failed(f"cannot read or write: {error}{remedy}", 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def run() -> None:
    """The console script. A terminal that cannot show × or ρ gets a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(main())


def _failed(what: object, code: int) -> int:
    say_as(os.environ.get("RANK", "0"), what)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dualres",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The residual pathway of a Transformer as a replaceable part.",
        epilog="start with:\n  dualres params\n  dualres describe nano dar-block\n  dualres train nano dar-block",
    )
    parser.add_argument("--version", action="version", version=f"dualres {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.add(commands)
    return parser

"""The command line: `dualres COMMAND --help` explains each.

Command modules declare their arguments without importing torch; what runs a command is imported when it runs.
"""

import argparse
import difflib
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from dualres.config.schema import ConfigError
from dualres.util import optional_dependencies
from dualres.util.errors import DataError, ModelError, TrainError
from dualres.util.progress import say_as
from dualres.util.version import VERSION

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COMMANDS = {  # name -> module in dualres.commands, in the order of the help
    "params": "params",
    "describe": "describe",
    "plan": "plan",
    "prepare": "prepare",
    "train": "train",
    "generate": "generate",
    "suite": "suite",
    "evaluate": "evaluate",
    "analyze": "analyze",
    "report": "report",
    "export": "export",
    "import": "import_model",
    "convert": "convert",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. -> exit code: 0 fine, 1 a check or a run failed, 2 the input was wrong, 130 interrupted"""
    try:
        arguments = parse(sys.argv[1:] if argv is None else argv)
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError, ModelError, optional_dependencies.MissingExtraError) as error:
        return _failed(error, 2)
    except TrainError as error:
        return _failed(error, 1)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        remedy = ": free space there and run the same command again" if error.errno in NO_SPACE else ""
        return _failed(f"cannot read or write: {error}{remedy}", 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def run() -> None:
    """The console script. A terminal that cannot show × or ρ gets a question mark."""
    optional_dependencies.on_demand = True
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(main())


def _failed(what: object, code: int) -> int:
    say_as(os.environ.get("RANK", "0"), what)
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The arguments of a command; a wrong one exits with the usage of that command and the nearest right one."""
    parser = argparse.ArgumentParser(
        prog="dualres",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The residual pathway of a Transformer as a replaceable part.",
        epilog="start with:\n  dualres params\n  dualres describe nano dar-block\n  dualres train nano dar-block",
    )
    parser.add_argument("--version", action="version", version=f"dualres {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="name", required=True)
    for module in COMMANDS.values():
        importlib.import_module(f"dualres.commands.{module}").add(commands)
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        parser.error(f"there is no command {name}{_nearest(name, COMMANDS)}")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands.choices[arguments.name]
        options = [option for action in command._actions for option in action.option_strings]
        command.error(f"unrecognized arguments: {' '.join(unknown)}{_nearest(unknown[0].split('=')[0], options)}")
    return arguments


def _nearest(word: str, known: Sequence[str] | dict[str, str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""

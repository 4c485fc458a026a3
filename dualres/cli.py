"""The command line; `dualres COMMAND --help` explains each command.

A command's module is imported when the command is used, and declares its arguments without importing torch or NumPy;
what the command needs is imported when it runs.
"""

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from dualres.config.plugins import load_plugins
from dualres.config.validation import suggesting
from dualres.util import optional_dependencies
from dualres.util.errors import INTERRUPTED, ConfigError, DataError, ModelError, TrainError
from dualres.util.progress import say_as

QUIET, VERBOSE = ("-q", "--quiet"), ("-v", "--verbose")  # before or after the command
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
    "completion": "completion",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. -> exit code: 0 success, 1 a check or a run failed, 2 invalid input, 130 interrupted"""
    verbose = False
    try:
        try:
            args = parse(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()  # the text of --help, whose reader may have exited
        verbose = args.verbosity > 0
        if verbose:
            import logging

            logging.basicConfig(level=logging.INFO)
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError, ModelError, optional_dependencies.MissingExtraError) as error:
        return _failed(error, 2, verbose)
    except TrainError as error:
        return _failed(error, 1, verbose)
    except BrokenPipeError:  # the reader, such as `head`, has exited
        sys.stderr.close()
        return 0
    except OSError as error:
        remedy = ": free some space there and rerun the command" if error.errno in NO_SPACE else ""
        return _failed(f"cannot read or write: {error}{remedy}", 1, verbose)
    except KeyboardInterrupt:
        return _failed("interrupted", INTERRUPTED, verbose)


def _failed(message: object, code: int, verbose: bool) -> int:
    if verbose:
        import traceback

        traceback.print_exc()
    say_as(os.environ.get("RANK", "0"), message)
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; an unknown argument exits with the usage of its command and the closest valid option."""
    name = next((word for word in argv if not word.startswith("-")), None)
    leading = argv if name is None else argv[: argv.index(name)]
    if "--plugin" in leading:
        make_parser([])[0].error("--plugin goes after the command: dualres train … --plugin MODULE")
    load_plugins(named_plugins(argv))  # before the modules of the commands list all methods in their help
    # Only the main help, which may be abbreviated, needs the parsers of all commands.
    is_help = any(word not in (*QUIET, *VERBOSE, "--version") for word in leading)
    parser, commands = make_parser(COMMANDS if is_help else [name] if name in COMMANDS else [])
    if name is not None and name not in COMMANDS:
        parser.error(suggesting(f"unknown command {name}", name, COMMANDS))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[args.name]
        options = [option for action in command._actions for option in action.option_strings]
        command.error(suggesting(f"unrecognized arguments: {' '.join(unknown)}", unknown[0].split("=")[0], options))
    return args


def named_plugins(argv: Sequence[str]) -> list[str]:
    """The values of --plugin; each command declares the option as well."""
    scanner = argparse.ArgumentParser(prog="dualres", add_help=False)
    scanner.add_argument("--plugin", nargs="?", action="append", default=[])  # the command's parser wants a value
    return [module for module in scanner.parse_known_args(argv)[0].plugin if module is not None]


def make_parser(names: Iterable[str] = COMMANDS) -> tuple["Parser", dict[str, "Parser"]]:
    """The main parser, and the parsers of these commands by name."""
    parser = Parser(
        prog="dualres",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The residual pathway of a Transformer as a replaceable part.",
        epilog="start with:\n  dualres params\n  dualres describe nano dar-block\n  dualres train nano dar-block",
    )
    parser.add_argument("--version", nargs=0, action=_Version, help="show the version and exit")
    _add_verbosity(parser, default=0)
    commands = parser.add_subparsers(metavar="COMMAND", dest="name", required=True)
    for name in names:
        command = importlib.import_module(f"dualres.commands.{COMMANDS[name]}")
        summary, _, description = (command.__doc__ or "").partition("\n\n")
        subparser = commands.add_parser(
            name,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            help=summary.rstrip("."),
            description=description,
            epilog=command.EPILOG,
        )
        command.add_arguments(subparser)
        _add_verbosity(subparser, default=argparse.SUPPRESS)  # else it would undo an option before the command
        subparser.set_defaults(command=command.run, make_parser=make_parser)  # which `completion` reads
    return parser, commands.choices


class Parser(argparse.ArgumentParser):
    """Suggests the closest choice for an unknown one."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            message = f"invalid choice {value!r}, use {', '.join(map(str, action.choices))}"
            raise argparse.ArgumentError(action, suggesting(message, value, action.choices))


class _Version(argparse.Action):
    """Looks the version up, which takes time, only to print it."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from dualres.util.version import VERSION

        print(f"dualres {VERSION}")
        parser.exit()


def _add_verbosity(parser: argparse.ArgumentParser, default: Any) -> None:
    either = parser.add_mutually_exclusive_group()
    add = partial(either.add_argument, dest="verbosity", action="store_const", default=default)
    add(*QUIET, const=-1, help="print only results and errors")
    add(*VERBOSE, const=1, help="print every step, and tracebacks of errors")

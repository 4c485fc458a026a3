"""The command line; `dualres COMMAND --help` explains each command.

Command modules declare their arguments without importing torch; a command imports what it needs when it runs.
"""

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from dualres.config.plugins import load_plugins
from dualres.config.schema import ConfigError
from dualres.config.validation import did_you_mean
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
    """Run one command. -> exit code: 0 success, 1 a check or a run failed, 2 invalid input, 130 interrupted"""
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        code: int = args.command(args)
        sys.stdout.flush()
        return code
    except (ConfigError, DataError, ModelError, optional_dependencies.MissingExtraError) as error:
        return _failed(error, 2)
    except TrainError as error:
        return _failed(error, 1)
    except BrokenPipeError:  # the reader, such as `head`, has exited
        sys.stderr.close()
        return 0
    except OSError as error:
        remedy = ": free some space there and rerun the command" if error.errno in NO_SPACE else ""
        return _failed(f"cannot read or write: {error}{remedy}", 1)
    except KeyboardInterrupt:
        return _failed("interrupted", 130)


def run() -> None:
    """The console script. Characters that the terminal cannot show, such as × or ρ, become question marks."""
    optional_dependencies.on_demand = True
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read by transformers when a command imports it
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(main())


def _failed(message: object, code: int) -> int:
    say_as(os.environ.get("RANK", "0"), message)
    return code


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; an unknown argument exits with the usage of its command and the closest valid option."""
    load_plugins(named_plugins(argv))  # before the modules of the commands list all methods in their help
    parser, commands = make_parser()
    name = next((word for word in argv if not word.startswith("-")), None)
    if name is not None and name not in commands:
        parser.error("; ".join(filter(None, [f"unknown command {name}", did_you_mean(name, list(commands))])))
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        command = commands[args.name]
        options = [option for action in command._actions for option in action.option_strings]
        remedy = did_you_mean(unknown[0].split("=")[0], options)
        command.error("; ".join(filter(None, [f"unrecognized arguments: {' '.join(unknown)}", remedy])))
    return args


def named_plugins(argv: Sequence[str]) -> list[str]:
    """The values of --plugin; each command declares the option as well."""
    scanner = argparse.ArgumentParser(prog="dualres", add_help=False)
    scanner.add_argument("--plugin", action="append", default=[])
    return list(scanner.parse_known_args(argv)[0].plugin)


def make_parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The main parser, and the parser of each command by name."""
    parser = argparse.ArgumentParser(
        prog="dualres",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="The residual pathway of a Transformer as a replaceable part.",
        epilog="start with:\n  dualres params\n  dualres describe nano dar-block\n  dualres train nano dar-block",
    )
    parser.add_argument("--version", action="version", version=f"dualres {VERSION}")
    commands = parser.add_subparsers(metavar="COMMAND", dest="name", required=True)
    for name, module in COMMANDS.items():
        command = importlib.import_module(f"dualres.commands.{module}")
        summary, _, description = (command.__doc__ or "").partition("\n\n")
        subparser = commands.add_parser(
            name,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            help=summary.rstrip("."),
            description=description,
            epilog=command.EPILOG,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command.run)
    return parser, commands.choices

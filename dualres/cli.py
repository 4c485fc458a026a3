"""The command line: `dualres COMMAND --help` explains each."""

import argparse
import io
import json
import sys
from collections.abc import Sequence

from dualres import __version__, describe, params
from dualres.config import ConfigError
from dualres.experiment import load_config, names

_OVERRIDES = """
overrides:
  --set changes any key of the scale's and the residual's file, as often as needed:
    --set residual.layers_per_block=4 --set residual.sets=branch --set model.layers=12
  docs/configuration.md lists every key.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 fine, 1 a check failed, 2 the input was wrong."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"dualres: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return 0
    except OSError as error:
        print(f"dualres: cannot write the output: {error}", file=sys.stderr)
        return 1


def run() -> None:
    """The console script. A terminal that cannot show × or ρ gets a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    sys.exit(main())


def _params(arguments: argparse.Namespace) -> int:
    rows = params.compare()
    wrong = [row for row in rows if not row.agrees]
    if arguments.json:
        print(json.dumps({"agrees": not wrong, "rows": [params.as_data(row) for row in rows]}, indent=2))
    else:
        print(params.as_text(rows))
    for row in wrong:
        print(
            f"dualres: {row.scale} {row.residual}, {row.column}: the paper prints {row.paper}, "
            f"we count {row.ours:,} ({row.printed})",
            file=sys.stderr,
        )
    return 1 if wrong else 0


def _describe(arguments: argparse.Namespace) -> int:
    described = describe.describe(load_config(arguments.scale, arguments.residual, arguments.set))
    if arguments.json:
        print(json.dumps(described, indent=2))
    else:
        print(describe.as_text(described, f"{arguments.scale} × {arguments.residual}"))
    return 0


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="dualres",
        formatter_class=raw,
        description="The residual pathway of a Transformer as a replaceable part.",
        epilog="start with:\n  dualres params\n  dualres describe nano dar-block",
    )
    parser.add_argument("--version", action="version", version=f"dualres {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    sub = commands.add_parser(
        "params",
        formatter_class=raw,
        help="the paper's parameter tables, ours beside them",
        description="Build every model of the paper's two parameter tables on the meta device, count its parameters,\n"
        "and compare with the printed numbers to the last digit. Exits with 1 if any differs.",
    )
    sub.add_argument("--json", action="store_true", help="print JSON instead of a table")
    sub.set_defaults(command=_params)

    sub = commands.add_parser(
        "describe",
        formatter_class=raw,
        help="structure, parameters, flops and residual state of one model",
        description="Show how SCALE on RESIDUAL is built and what it costs. Builds it on the meta device, so it takes\n"
        "seconds and no memory, whatever the scale.",
        epilog=f"scales:     {', '.join(names('scale'))}\nresiduals:  {', '.join(names('residual'))}\n{_OVERRIDES}\n"
        "example:\n  dualres describe 1b dar-block",
    )
    sub.add_argument("scale", metavar="SCALE", help="a scale by name, or the path of a YAML file")
    sub.add_argument("residual", metavar="RESIDUAL", help="a residual by name, or the path of a YAML file")
    sub.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change a key; may be repeated")
    sub.add_argument("--json", action="store_true", help="print JSON instead of text")
    sub.set_defaults(command=_describe)
    return parser

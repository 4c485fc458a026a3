"""Check parameter counts against the paper's tables.

Build every model of the paper's two parameter tables on the meta device, count its parameters,
and compare them with the published numbers to the last digit. Exits with 1 if any differs.
"""

import argparse
import json
import sys

EPILOG = "example:\n  dualres params --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    from dualres.plan import parameter_tables

    rows = parameter_tables.compare()
    wrong = [row for row in rows if not row.agrees]
    if args.json:
        print(json.dumps({"agrees": not wrong, "rows": [parameter_tables.as_data(row) for row in rows]}, indent=2))
    else:
        print(parameter_tables.as_text(rows))
    for row in wrong:
        print(
            f"dualres: {row.scale} {row.residual}, {row.column}: the paper prints {row.paper}, "
            f"we count {row.ours:,} ({row.printed})",
            file=sys.stderr,
        )
    return 1 if wrong else 0

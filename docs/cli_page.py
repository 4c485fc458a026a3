"""Writes docs/reference/cli.md from the parsers of the commands.

`python docs/cli_page.py` after a change to an argument or a help text; a test compares the page with them.
"""

import argparse
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualres.cli import make_parser

PAGE = Path(__file__).parent / "reference" / "cli.md"
GUIDES = {
    "params": "[Verification](../verification.md)",
    "describe": "[Performance](../performance.md)",
    "plan": "[Scaling](../scaling.md)",
    "prepare": "[Training](../training.md#data)",
    "train": "[Training](../training.md)",
    "generate": "[Get started](../get-started.md)",
    "suite": "[Training](../training.md#comparing-methods)",
    "evaluate": "[Evaluation](../evaluation.md)",
    "analyze": "[Analysis](../analysis.md)",
    "report": "[Analysis](../analysis.md#the-report)",
    "export": "[Models](../models.md)",
    "import": "[Models](../models.md)",
    "convert": "[Models](../models.md#convert)",
    "completion": "[Get started](../get-started.md#in-your-shell)",
}
INTRODUCTION = """\
<!-- Written by docs/cli_page.py from the parsers of dualres/commands/. -->

# Command line

`dualres COMMAND --help` prints the same. A command exits with 0 on success, 1 if a check or a run
failed, 2 for invalid input, and 130 if it was interrupted. `python -m dualres` is the same program.

Every command takes `-q` or `--quiet`, to print only results and errors, and `-v` or `--verbose`, to
print every step and the tracebacks of errors. Progress goes to standard error: a bar on a terminal
(in color, unless `NO_COLOR` is set), otherwise a line every ten seconds.
"""


def page() -> str:
    """The whole page."""
    parser, commands = make_parser()
    [listed] = typing.cast(Any, parser._subparsers)._group_actions
    purposes = {action.dest: action.help for action in listed._choices_actions}
    rows = "".join(f"| [`{name}`](#{name}) | {purposes[name]} | {GUIDES[name]} |\n" for name in commands)
    sections = [part for name, command in commands.items() for part in _section(name, command)]
    return "\n".join([INTRODUCTION, f"| command | purpose | guide |\n|---|---|---|\n{rows}", *sections])


def _section(name: str, command: argparse.ArgumentParser) -> Iterator[str]:
    """A command's description, its arguments, and the epilog of its help."""
    yield f"## {name}\n"
    yield textwrap.fill(" ".join((command.description or "").split()), 100) + "\n"
    for group in command._action_groups:
        actions = [action for action in group._group_actions if action.dest not in ("help", "verbosity")]
        if actions:
            rows = "".join(f"| `{_name(action)}` | {action.help} |\n" for action in actions)
            yield f"| {group.title} | meaning |\n|---|---|\n{rows}"
    yield f"```text\n{(command.epilog or '').strip()}\n```\n"


def _name(action: argparse.Action) -> str:
    value = action.metavar or ("" if action.choices is None else f"{{{','.join(action.choices)}}}")
    shown = {"+": f"{value} …", "?": f"[{value}]", "*": f"[{value} …]"}.get(str(action.nargs), str(value))
    return f"{', '.join(action.option_strings)} {shown}".strip()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The documentation of config classes: the text under each field."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
import typing


def documentation(section: type) -> dict[str, str]:
    """The text under each field of a dataclass, with those of its bases first."""
    found: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if dataclasses.is_dataclass(kind):
            body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
            for field, text in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = ast.literal_eval(text.value)
    return found

"""Packages that only some features need, installed as extras of dualres."""

import importlib
from typing import Any

# The command line sets it: `transformers`, which takes seconds to import, is then imported where a command needs it.
on_demand = False


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra, or raise an error that tells how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtraError(missing(module.split(".")[0], extra, purpose)) from None


def missing(package: str, extra: str, purpose: str) -> str:
    """What to say of a package that is not installed. dualres is on no package index: an install line needs a clone."""
    return f"{purpose} needs the package {package}, of the extra {extra}: {install(extra)} in a clone of dualres"


def install(extra: str) -> str:
    """The command that adds an extra."""
    return f"pip install -e '.[{extra}]'"

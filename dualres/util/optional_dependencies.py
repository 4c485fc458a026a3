"""Packages that only some features need, installed as extras of dualres."""

import importlib
import importlib.util
from typing import Any

# Set by the command line: then only commands that need `transformers`, which takes seconds to import, import it.
on_demand = False


class MissingExtraError(ImportError):
    """Raised if a package of an extra is not installed."""


def available(package: str) -> bool:
    """Whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra, or raise an error with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtraError(missing(module.split(".")[0], extra, purpose)) from None


def missing(package: str, extra: str, purpose: str) -> str:
    """The message for a missing package. dualres is not on a package index, so installation needs a clone."""
    return f"{purpose} needs the package {package} (extra {extra}): {install(extra)} in a clone of dualres"


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install -e '.[{extra}]'"

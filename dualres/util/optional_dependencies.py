"""Optional dependencies."""

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """A package of an extra is not installed."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra, or raise an error that tells how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{purpose} needs the package {module.split('.')[0]}: pip install 'dualres[{extra}]'"
        ) from None

"""Parts that are installed only by those who want them."""

import importlib
from typing import Any


class MissingExtraError(ImportError):
    """A package that is not installed: the message has the command."""


def need(module: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise MissingExtraError(
            f"{purpose} needs the package {module.split('.')[0]}: pip install 'dualres[{extra}]'"
        ) from None

"""Plugins: modules of users that register residual methods, imported because a user names them with `--plugin`.

Code is never imported because a run folder or a model names it.
"""

import importlib
import os
import sys
from collections.abc import Sequence

from dualres.util.errors import ConfigError

REGISTERED: dict[str, str] = {}  # methods of `dualres.register_method`, each with the module that registers it


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules that register methods; the current folder is searched last."""
    for module in modules:
        if module.endswith(".py") or not is_module_name(module):
            raise ConfigError(f"--plugin {module} is not a module: use my_methods for the file my_methods.py")
        if os.getcwd() not in sys.path:  # of `python -m dualres`, but not of `dualres`
            sys.path.append(os.getcwd())
        before = set(REGISTERED)
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):  # the plugin's own import failed
                raise
            raise ConfigError(
                f"--plugin {module}: no module named {error.name}: run the command in its folder, or add that folder "
                "to PYTHONPATH"
            ) from None
        REGISTERED.update(dict.fromkeys(REGISTERED.keys() - before, module))


def is_module_name(text: object) -> bool:
    return isinstance(text, str) and all(part.isidentifier() for part in text.split("."))

"""The plugin of docs/adding-a-residual.md, and a registry that forgets it."""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dualres.config.plugins import REGISTERED
from dualres.residual.registry import METHODS

EXAMPLE = Path(__file__).parent.parent / "docs" / "adding-a-residual.md"
MODULE = "my_methods"


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def write_plugin(folder: Path) -> None:
    (folder / f"{MODULE}.py").write_text(python_blocks(EXAMPLE)[0])


@contextlib.contextmanager
def forgotten_afterwards() -> Iterator[None]:
    """Methods that are registered meanwhile, and the modules that do so, are as new afterwards."""
    path = [*sys.path]
    try:
        yield
    finally:
        forget()
        sys.path[:] = path


def forget() -> None:
    """As in a new process that has imported no plugin."""
    for name in [*REGISTERED]:
        del METHODS[name], REGISTERED[name]
    sys.modules.pop(MODULE, None)

"""The code that a saved model carries, so that it loads with `trust_remote_code` where dualres is not installed.

`transformers` copies flat files that name each other by `from .name import …`. So every module that the model needs is
written as one file, dualres/ops/reference.py as dualres_ops_reference.py, and its imports are rewritten. The kernels
stay out: such a model runs by the plain equations, and installing dualres makes it fast.
"""

import ast
import json
from pathlib import Path

from dualres.util.atomic_files import write_json, write_text
from dualres.util.version import VERSION

PACKAGE = Path(__file__).parent.parent
ENTRIES = {"dualres.hub.hf_config": "configuration_dualres", "dualres.hub.hf_model": "modeling_dualres"}
AUTO_MAP = {
    "AutoConfig": "configuration_dualres.DualResConfig",
    "AutoModelForCausalLM": "modeling_dualres.DualResForCausalLM",
}
CONFIG = "config.json"


def add_code(folder: Path) -> None:
    """Write the code into a saved model's folder and name it in the config."""
    sources = code()
    for name, text in sources.items():
        write_text(folder / f"{name}.py", text)
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "auto_map": AUTO_MAP})


def code() -> dict[str, str]:
    """Name and text of every file."""
    needed = _closure(list(ENTRIES))
    files = {flat_name(module): _rewritten(module) for module in needed}
    # transformers finds files by such lines alone, and does not look at `from . import name`.
    names = sorted(flat_name(module) for module in needed if module not in ENTRIES)
    listed = "\n".join(f"    from .{name} import *  # noqa: F403" for name in names)
    files["modeling_dualres"] += f"\n\nif False:  # what else must be copied with this file\n{listed}\n"
    return files


def flat_name(module: str) -> str:
    """dualres.ops.reference -> dualres_ops_reference"""
    return ENTRIES.get(module, module.replace(".", "_"))


def _closure(modules: list[str]) -> list[str]:
    """The modules with all of ours that they import, and those import."""
    found = list(modules)
    for module in found:
        for node in _our_imports(module):
            found += [name for name in _imported(node) if name not in found]
    return found


def _our_imports(module: str) -> list[ast.ImportFrom]:
    tree = ast.parse(_path(module).read_text(encoding="utf-8"))
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [node for node in nodes if node.module and node.module.split(".")[0] == PACKAGE.name]


def _imported(node: ast.ImportFrom) -> list[str]:
    """The modules that an import needs: `from dualres.ops import dispatch` means dualres.ops.dispatch."""
    inside = [name for alias in node.names if _is_module(name := f"{node.module}.{alias.name}")]
    return inside if len(inside) == len(node.names) else [str(node.module), *inside]


def _rewritten(module: str) -> str:
    """The text of a module with flat, relative imports."""
    lines = _path(module).read_text(encoding="utf-8").splitlines()
    for node in sorted(_our_imports(module), key=lambda node: node.lineno, reverse=True):
        assert node.end_lineno is not None
        indent = lines[node.lineno - 1][: node.col_offset]
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}" for line in _flat(node)]
    origin = f"# dualres {VERSION} (Apache-2.0): {_path(module).relative_to(PACKAGE.parent).as_posix()}"
    return "\n".join([origin, *lines]) + "\n"


def _flat(node: ast.ImportFrom) -> list[str]:
    """One import, flat and relative; modules and what is inside them have a line each."""
    modules = [alias for alias in node.names if _is_module(f"{node.module}.{alias.name}")]
    others = [alias for alias in node.names if alias not in modules]
    lines = [
        f"from . import {flat_name(f'{node.module}.{alias.name}')} as {alias.asname or alias.name}" for alias in modules
    ]
    if others:
        names = ", ".join(f"{a.name} as {a.asname}" if a.asname else a.name for a in others)
        lines.append(f"from .{flat_name(str(node.module))} import {names}")
    return lines


def _is_module(name: str) -> bool:
    return _path(name).is_file()


def _path(module: str) -> Path:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")

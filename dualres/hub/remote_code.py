"""The code saved with a model, which loads it with `trust_remote_code` where dualres is not installed.

`transformers` copies flat files that import each other with `from .name import …`. So every module that the model needs
is written as one file, dualres/ops/reference.py as dualres_ops_reference.py, and its imports are rewritten. Kernels are
not included: the model runs the plain equations, and installing dualres makes it fast.
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
    """Write the code to a saved model's folder and refer to it in the config."""
    sources = code()
    for name, text in sources.items():
        write_text(folder / f"{name}.py", text)
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**config, "auto_map": AUTO_MAP})


def code() -> dict[str, str]:
    """Name and text of every file: the entries, and all dualres modules that they import, directly or indirectly."""
    modules, files = list(ENTRIES), {}
    for module in modules:
        files[flat_name(module)], needed = _flat(module)
        modules += [name for name in dict.fromkeys(needed) if name not in modules]
    # transformers finds files by such lines only, not by `from . import name`.
    names = sorted(name for name in files if name not in ENTRIES.values())
    listed = "\n".join(f"    from .{name} import *  # noqa: F403" for name in names)
    files["modeling_dualres"] += f"\n\nif False:  # lists the files that must be copied with this one\n{listed}\n"
    return files


def flat_name(module: str) -> str:
    """dualres.ops.reference -> dualres_ops_reference"""
    return ENTRIES.get(module, module.replace(".", "_"))


def _flat(module: str) -> tuple[str, list[str]]:
    """The text of a module with flat, relative imports, one name each, and the dualres modules that it imports."""
    path = _path(module)
    text = path.read_text(encoding="utf-8")
    lines, needed = text.splitlines(), []
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        package = str(node.module)
        if package.split(".")[0] != PACKAGE.name:
            continue
        statements = []
        for name in node.names:
            inside = f"{package}.{name.name}"  # a module, as in `from dualres.ops import dispatch`
            needed.append(inside if _path(inside).is_file() else package)
            source = "." if needed[-1] == inside else f".{flat_name(package)}"
            imported = flat_name(inside) if needed[-1] == inside else name.name
            statements.append(f"{' ' * node.col_offset}from {source} import {imported} as {name.asname or name.name}")
        lines[node.lineno - 1 : node.end_lineno] = statements
    origin = f"# dualres {VERSION} (Apache-2.0): {path.relative_to(PACKAGE.parent).as_posix()}"
    return "\n".join([origin, *lines]) + "\n", needed


def _path(module: str) -> Path:
    base = PACKAGE.parent.joinpath(*module.split("."))
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")

"""Imports point one way, from ops to commands, and neither side names the other's parts."""

import ast
from pathlib import Path

import pytest

import dualres
from dualres.residual.registry import METHODS

PACKAGE = Path(dualres.__file__).parent
# A file may import from its own layer and from those before it.
LAYERS = [
    ["util"],
    ["config"],
    ["ops"],
    ["residual"],
    ["model", "data"],
    ["analyze"],
    ["parallel"],
    ["train"],
    ["plan"],
    ["hub"],
    ["evaluate"],
    ["report"],
    ["commands"],
    ["cli"],
    ["__init__", "__main__"],
]
FILES = sorted(PACKAGE.rglob("*.py"))


def layer(module: str) -> int:
    parts = module.split(".")[1:] or ["__init__"]
    found = [i for i, names in enumerate(LAYERS) for n in (2, 1) if ".".join(parts[:n]) in names]
    assert found, f"{module} is in no layer: add it to LAYERS"
    return max(found)


def imported(path: Path) -> set[str]:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            # `from dualres import ops` imports dualres.ops.
            top = node.module == "dualres"
            modules |= (
                {f"dualres.{alias.name}" for alias in node.names if not alias.name.startswith("_")}
                if top
                else {str(node.module)}
            )
    return {module for module in modules if module.split(".")[0] == "dualres"}


def module_name(path: Path) -> str:
    return ".".join(["dualres", *path.relative_to(PACKAGE).with_suffix("").parts])


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_point_one_way(path: Path):
    own = layer(module_name(path))
    wrong = [module for module in imported(path) if layer(module) > own]
    assert not wrong, f"{module_name(path)} imports {wrong} from a later layer"


def words(path: Path) -> str:
    """All names and texts of a file but its docstrings and comments."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.append(str(node.arg))
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.append(str(node.module))
        elif isinstance(node, ast.Constant) and node.value in METHODS:
            found.append(str(node.value))
    return " ".join(found).lower()


@pytest.mark.parametrize("path", sorted((PACKAGE / "model").glob("*.py")), ids=module_name)
def test_the_model_names_no_residual_method(path: Path):
    named = [name for name in ("attnres", "hyper", "mhc", "sinkhorn", "retriev", *METHODS) if name in words(path)]
    assert not [name for name in named if name != "standard"]


@pytest.mark.parametrize("path", sorted((PACKAGE / "residual").glob("*.py")), ids=module_name)
def test_the_residual_names_no_branch(path: Path):
    assert not [name for name in ("feedforward", "swiglu", "moe", "attention") if name in words(path)]

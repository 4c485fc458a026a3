"""The docs stay true: quoted code stands in the source, links lead somewhere."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.add_to_your_model import MLP, SelfAttention

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")])
SOURCE = {path: path.read_text() for path in (ROOT / "dualres").rglob("*.py")}


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", code_blocks(ROOT / "docs" / "mathematics.md"))
def test_quoted_code_stands_in_the_source(block: str):
    assert any(block in text for text in SOURCE.values()), f"not in dualres/ any more:\n{block}"


def test_routes_are_quoted_rightly():
    quoted = re.findall(r"`(\w+ = Route\(.*?\))` \|", (ROOT / "docs" / "mathematics.md").read_text())
    source = (ROOT / "dualres" / "residual" / "route.py").read_text()
    assert len(quoted) == 6
    assert all(route in source for route in quoted)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_in_the_docs_exist(page: Path):
    for name in re.findall(r"`((?:tests|examples|benchmarks|configs|dualres|docs)/[\w./-]+\.\w+)", page.read_text()):
        if "highway" not in name:  # the method that docs/adding-a-residual.md makes up
            assert (ROOT / name).exists(), f"{page.name} names {name}"


@pytest.mark.parametrize("page", ["README.md", "docs/analysis.md"])
def test_snippet_runs(page: str):
    snippet = code_blocks(ROOT / page)[-1]
    exec(snippet, {})


def test_the_page_of_your_own_model_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Its blocks, one after another, and the output that it shows."""
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / "own-model.md"
    width, heads, layers = 16, 2, 2
    before = SimpleNamespace(attention=[SelfAttention(width, heads)], mlp=[MLP(width)])
    names: dict[str, Any] = {
        "self": before,
        "x": torch.randn(2, 3, width),
        "width": width,
        "heads": heads,
        "layers": layers,
    }
    names |= {"SelfAttention": SelfAttention, "MLP": MLP}
    with torch._dynamo.config.patch(), torch._functorch.config.patch():
        for block in code_blocks(page):
            exec(block, names)
    [shown] = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out == shown

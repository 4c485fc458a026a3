"""The docs stay true: quoted code stands in the source, links lead somewhere, every config key is described."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dualres.config.schema import (
    AnalyzeConfig,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    ResidualConfig,
    RopeScaling,
    TrainConfig,
)
from dualres.residual.registry import METHODS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "results").glob("*.md")])
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


@pytest.mark.parametrize(
    ("section", "prefix"),
    [
        (ModelConfig, ""),
        (MoEConfig, "moe."),
        (RopeScaling, "rope_scaling."),
        (ResidualConfig, ""),
        (TrainConfig, ""),
        (ParallelConfig, "parallel."),
        (AnalyzeConfig, ""),
    ],
)
def test_every_key_is_described(section: type, prefix: str):
    text = (ROOT / "docs" / "configuration.md").read_text()
    for field in dataclasses.fields(section):
        nested = field.name == "parallel"
        assert nested or f"| `{prefix}{field.name}` |" in text, f"{section.__name__}.{field.name} is not described"


def test_defaults_are_described_rightly():
    text = (ROOT / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text, re.MULTILINE))
    for section, prefix in ((ModelConfig, ""), (MoEConfig, "moe."), (TrainConfig, ""), (ParallelConfig, "parallel.")):
        for field in dataclasses.fields(section):
            if field.default not in (dataclasses.MISSING, None) and not dataclasses.is_dataclass(field.default):
                written = rows[prefix + field.name].replace("[", "(").replace("]", ")")
                default = str(field.default).lower()
                assert written == default or float(written) == float(default), field.name
    for option in ("share_parameters", "streams", "sinkhorn_steps", "value_rank", "rho_bias"):
        defaults = {str(row.options[option]).lower() for row in METHODS.values() if option in row.options}
        assert {rows[option]} == defaults
    dar, mhc = (METHODS[name].options["gate_scale"] for name in ("dar-block", "mhc"))
    assert rows["gate_scale"] == f"{dar} (DAR), {mhc} (mHC)"


def with_highway(root: Path) -> Path:
    """A copy of the project under `root` with all that docs/adding-a-residual.md says to write."""
    for part in ("dualres", "configs"):
        shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
    file, imported, row = code_blocks(ROOT / "docs" / "adding-a-residual.md")
    (root / "dualres" / "residual" / "highway.py").write_text(file)
    registry = root / "dualres" / "residual" / "registry.py"
    text = registry.read_text()
    at = text.index("from dualres.residual.hyper_connections")
    text = text[:at] + imported + text[at:]
    registry.write_text(text.replace("METHODS: dict[str, Method] = {\n", "METHODS: dict[str, Method] = {\n" + row))
    (root / "configs" / "residual" / "highway.yaml").write_text("method: highway\n")
    return root


def test_the_example_method_works(tmp_path: Path):
    def python(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    with_highway(tmp_path)
    assert "highway: 1 stream" in python("-m", "dualres", "describe", "nano", "highway")
    python("-c", HIGHWAY_TRAINS)


HIGHWAY_TRAINS = """
import torch
from dualres import ResidualConfig, build_decoder, load_config
config = load_config("nano", "highway")
decoder = build_decoder(config.model, config.residual)
tokens = torch.arange(7)[None]
logits = torch.compile(decoder, backend="eager", fullgraph=True)(tokens)
torch.nn.functional.cross_entropy(logits[0], tokens[0]).backward()
assert all(p.grad is not None for p in decoder.parameters())
wanted, decoder = logits.detach(), decoder.bfloat16()
# Each write halves what was there, so few branches count and their rounding is not averaged: 1.1 to 3.2 percent of
# the logits over six seeds (the methods that ship: 0.7 to 1.0).
assert (decoder(tokens).float() - wanted).norm() < 0.05 * wanted.norm()
"""


@pytest.mark.parametrize("page", ["README.md", "docs/analysis.md"])
def test_snippet_runs(page: str):
    snippet = code_blocks(ROOT / page)[-1]
    exec(snippet, {})

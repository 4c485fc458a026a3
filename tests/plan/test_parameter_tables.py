"""`dualres params`: the paper's tables to the digit, and a non-zero exit when a module changes shape."""

import json

import pytest
import torch
from torch import nn

from dualres.cli import main
from dualres.config import paper
from dualres.model.attention import Attention
from dualres.plan import parameter_tables
from dualres.residual.gate import Gate
from dualres.residual.retrieval import Queries


def test_all_printed_numbers_agree(capsys: pytest.CaptureFixture[str]):
    assert main(["params", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert sum(len(row.counts) for row in paper.DENSE_COUNTS + paper.MOE_COUNTS) == 54
    assert len(rows) == 54 + 1
    assert all(row["agrees"] for row in rows)
    unbuilt = {(row["scale"], row["residual"], row["unbuilt"]) for row in rows if row["unbuilt"]}
    assert unbuilt == {
        ("0.1b", "dar-full", 16 * (2 * 640 + 2)),
        ("0.3b", "dar-full", 20 * (2 * 1024 + 2)),
        ("0.5b", "dar-full", 20 * (2 * 1280 + 2)),
    }
    assert rows[-1] == {
        "scale": "moe-7b",
        "residual": "dar-block",
        "column": "more than attnres-block",
        "paper": "0.363",
        "ours": 362_624,
        "unbuilt": 0,
        "unit": 1_000_000,
        "printed": "0.363",
        "agrees": True,
    }


def test_the_table_says_why_dar_full_differs(capsys: pytest.CaptureFixture[str]):
    assert main(["params"]) == 0
    text = capsys.readouterr().out
    assert "55 of 55 printed numbers agree" in text
    assert "L(2d+2)" in text
    assert text.count("= with those not built") == 6


def widen(module: type[nn.Module], parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give one parameter of every `module` one more row."""
    build = module.__init__

    def changed(self: nn.Module, *args: object, **kwargs: object) -> None:
        build(self, *args, **kwargs)
        owner, _, name = parameter.rpartition(".")
        at = self.get_submodule(owner)
        shape = getattr(at, name).shape
        setattr(at, name, nn.Parameter(torch.empty(shape[0] + 1, *shape[1:], device="meta")))

    monkeypatch.setattr(module, "__init__", changed)


@pytest.mark.parametrize(
    ("module", "parameter"),
    [(Queries, "weight"), (Gate, "weight"), (Attention, "query.weight")],
    ids=["queries", "gates", "attention"],
)
def test_a_changed_shape_fails(
    module: type[nn.Module], parameter: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    widen(module, parameter, monkeypatch)
    assert main(["params"]) == 1
    out, err = capsys.readouterr()
    assert "DIFFERS" in out
    assert "the paper prints" in err


@pytest.mark.parametrize("removed", ["not_built", "built"])
def test_only_the_unused_rho_is_allowed(removed: str, monkeypatch: pytest.MonkeyPatch):
    """Neither a DAR-Full that does build them, nor another method that lacks as many, would pass."""
    if removed == "not_built":
        monkeypatch.setattr(parameter_tables, "WITHOUT_UNUSED_RHO", ())
    else:
        monkeypatch.setattr(parameter_tables, "WITHOUT_UNUSED_RHO", ("dar-full", "dar-block"))
    assert main(["params"]) == 1


@pytest.mark.parametrize(
    ("count", "unit", "printed"),
    [(98_325_499, 10**6, "98.325"), (98_325_500, 10**6, "98.326"), (1_069_631_488, 10**6, "1,069.631")]
    + [(7_217_448_960, 10**9, "7.217"), (362_624, 10**6, "0.363")],
)
def test_rounding(count: int, unit: int, printed: str):
    assert parameter_tables.as_printed(count, unit) == printed

"""The decoder's own parts: vocabulary forms, accounting, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dualres.config.schema import ResidualConfig
from dualres.model import accounting, moe
from dualres.model.attention import KVCache
from dualres.model.block import NormedBranch
from dualres.model.decoder import build_decoder
from dualres.ops import dispatch, grouped_linear
from tests.small import (
    FEEDFORWARDS,
    MOE,
    RESIDUALS,
    gradients,
    model_config,
    next_token_loss,
    random_tokens,
    relative_error,
    stirred,
)

STANDARD = ResidualConfig("standard")


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("table_width", [None, 12], ids=["plain", "factorised"])
def test_vocabulary_forms(table_width: int | None, tied: bool):
    model = model_config(embedding_width=table_width, tied_embeddings=tied)
    decoder, tokens = stirred(model, STANDARD), random_tokens()
    v, d, e = model.vocab_size, model.width, table_width or model.width
    tables, maps = (1, 1) if tied else (2, 2)
    expected = tables * v * e + (maps * d * e if table_width else 0)
    assert accounting.parameters(decoder).vocabulary == expected

    weights = dict(decoder.vocabulary.named_parameters())
    into = weights["table.weight"] @ weights["widen.weight"].T if table_width else weights["table.weight"]  # (V,D)
    if tied:
        out = into
    else:
        out = weights["output.weight"] @ weights["narrow.weight"] if table_width else weights["output.weight"]
    torch.testing.assert_close(decoder.vocabulary.embed(tokens), into[tokens])
    hidden = torch.randn(2, 3, d)
    torch.testing.assert_close(decoder.vocabulary.logits(hidden), hidden @ out.T)
    next_token_loss(decoder(tokens), tokens).backward()
    gradients(decoder)  # asserts that none is missing


def test_active_parameters():
    """Per layer 4 of 6 experts are idle for a token."""
    count = accounting.parameters(build_decoder(model_config("moe"), STANDARD, device="meta"))
    assert count.total - count.active == 5 * 4 * 3 * 32 * MOE.expert_width
    dense = accounting.parameters(build_decoder(model_config(), STANDARD, device="meta"))
    assert dense.total == dense.active


@pytest.mark.parametrize(
    ("feedforward", "vocabulary"),
    [("dense", {}), ("moe", {}), ("dense", {"embedding_width": 12})]
    + [("dense", {"embedding_width": 12, "tied_embeddings": False})],
    ids=["dense", "moe", "factorised", "factorised-untied"],
)
def test_flops_equal_those_that_pytorch_counts(feedforward: str, vocabulary: dict[str, Any]):
    """With attention as plain products of all pairs of tokens."""
    model, length = model_config(feedforward, context=8, **vocabulary), 8
    counted = accounting.flops_per_token(build_decoder(model, STANDARD, device="meta"))
    decoder = build_decoder(model, STANDARD)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        decoder(random_tokens(1, length))
    flops = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert flops["aten.mm"] + flops.get("dualres.grouped_linear", 0) == length * (counted.branches + counted.vocabulary)
    assert flops["aten.bmm"] * (length + 1) / 2 / length == length * counted.attention  # causal: (T+1)/2 of T keys


def test_arithmetic():
    """Products by their formula, one flop per element of other computations, nothing for moves and views."""
    a, b = torch.empty(3, 5, device="meta"), torch.empty(5, 7, device="meta")
    for computation, flops in [(lambda: a @ b, 2 * 3 * 5 * 7), (lambda: a + a, 15), (lambda: a.sum(), 15)]:
        with accounting.Arithmetic() as arithmetic:
            computation()
            torch.stack([a, a]).view(-1).clone()
        assert arithmetic.flops == flops


@pytest.mark.parametrize(("name", "at_least"), [("standard", 1), ("attnres-block", 4), ("dar-block", 8), ("mhc-4", 8)])
def test_residual_flops_grow_with_what_the_method_does(name: str, at_least: int):
    """In units of one addition per branch; `standard` does exactly that, and reads the last state."""
    model = model_config(layers=6)
    flops = accounting.flops_per_token(build_decoder(model, RESIDUALS[name], device="meta")).residual
    unit = 2 * model.layers * model.width
    assert flops >= at_least * unit
    if name == "standard":
        assert flops == unit + model.width


@pytest.mark.parametrize(
    ("name", "history", "live"),
    [("standard", 1, 1), ("mhc-4", 4, 4), ("attnres-block", 4, 1), ("attnres-full", 11, 1), ("dar-block", 8, 2)],
)
def test_state_bytes(name: str, history: int, live: int):
    """Five layers, two per block: three blocks and the embedding."""
    state = accounting.state_bytes_per_token(build_decoder(model_config(), RESIDUALS[name], device="meta"))
    assert state == (history * 32 * 2, live * 32 * 2)


@pytest.mark.parametrize(
    ("name", "prefix", "reads", "writes", "readout", "backward"),
    [
        ("standard", 0, 0, 10 * 3, 2, 10 * 3),
        ("mhc-4", 0, 5 * (9 + 11), 5 * (6 + 4), 5, 373),
        ("attnres-block", 3 + 4 + 5, 2 * (3 + 4 + 5) + 3, 5 + 5 + 3, 5 + 2, 113),
        ("dar-block", 6 + 8 + 10, 2 * (3 + 4 + 5 + 6) + (3 + 4), 6 + 6 + 4, 10 + 3, 210),
    ],
)
@pytest.mark.parametrize("forced", [None, "reference"])
def test_residual_traffic(
    name: str,
    prefix: int,
    reads: int,
    writes: int,
    readout: int,
    backward: int,
    forced: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    """Blocks of 4, 4 and 2 branches, of 2 for mHC; whatever runs. Forward by hand, as in docs/performance.md;
    backward as it was found."""
    monkeypatch.setattr(dispatch, "FORCED", forced)
    moved = accounting.residual_traffic(build_decoder(model_config(), RESIDUALS[name], device="meta"))
    assert moved.forward == prefix + reads + writes + readout
    assert moved.backward == backward


@pytest.mark.axes(name="dar-block", feedforward="dense")
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("name", RESIDUALS)
def test_autocast(name: str, feedforward: str):
    """bfloat16 branches on float32 streams: forward and backward run, and the logits are near those of float32."""
    model = model_config(feedforward)
    decoder, tokens = build_decoder(model, RESIDUALS[name]), random_tokens()
    with torch.no_grad():
        wanted = decoder(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits = decoder(tokens)
    next_token_loss(logits, tokens).backward()
    gradients(decoder)
    assert relative_error(logits, wanted) < 2e-2  # bfloat16 has 8 bits; weights, inputs and outputs are rounded


def test_a_mask_of_another_shape_is_refused():
    decoder, cache = build_decoder(model_config(), STANDARD), KVCache()
    decoder(random_tokens(2, 5), cache=cache)
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1\).* \(2, 6\)"):
        decoder(random_tokens(2, 1), attention_mask=torch.ones(2, 1), cache=cache)


def test_experts_follow_autocast(monkeypatch: pytest.MonkeyPatch):
    """As every `nn.Linear` does: products in bfloat16, forward and backward, and float32 without autocast."""
    seen: list[torch.dtype] = []

    def watched(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        seen.extend([rows.dtype, weight.dtype])
        return grouped_linear(rows, weight, counts)

    monkeypatch.setattr(moe, "grouped_linear", watched)
    decoder, tokens = build_decoder(model_config("moe"), STANDARD), random_tokens()
    with torch.autocast("cpu", torch.bfloat16):
        decoder(tokens)
    assert set(seen) == {torch.bfloat16}
    seen.clear()
    decoder(tokens)
    assert set(seen) == {torch.float32}


class OneMore(torch.nn.RMSNorm):
    """A norm with a formula of its own, as some models have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.weight * (1 + self.weight)


@pytest.mark.parametrize(
    "norm",
    [
        torch.nn.LayerNorm(8),
        torch.nn.RMSNorm(8),
        torch.nn.RMSNorm(8, 1e-6, False),
        torch.nn.RMSNorm((2, 4), 1e-6),
        OneMore(8, 1e-6),
    ],
    ids=str,
)
def test_a_norm_that_a_read_cannot_apply_is_refused(norm: torch.nn.Module):
    with pytest.raises(ValueError, match=r"must be an RMSNorm with weights and an eps.*as its first step"):
        NormedBranch(norm, torch.nn.Identity())  # type: ignore[arg-type]

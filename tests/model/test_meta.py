"""Decoders without memory, from a seed, in a state dict, and in other number formats."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dualres.config.loading import load_config, names
from dualres.config.schema import MoEConfig
from dualres.model.decoder import Decoder, build_decoder
from tests.small import FEEDFORWARDS, RESIDUALS, model_config, random_tokens, relative_error, stirred


class RealBytes(TorchDispatchMode):
    """Counts the bytes of every result that is not on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes += sum(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta)
        return out


@pytest.mark.axes(scale="1b", residual="dar-block")
@pytest.mark.parametrize("residual", names("residual"))
@pytest.mark.parametrize("scale", ["1b", "moe-7b"])
def test_paper_scale_takes_no_memory_on_meta(scale: str, residual: str):
    config = load_config(scale, residual)
    with RealBytes() as real:
        decoder = build_decoder(config.model, config.residual, device="meta")
    assert real.bytes < 100_000  # mHC's few biases per branch are made on the CPU
    assert all(p.is_meta for p in decoder.parameters())
    assert sum(p.numel() for p in decoder.parameters()) > 1e9


def shared_weights(decoder: Decoder) -> list[Tensor]:
    """Everything but the residual pathway, from the embedding up."""
    branches = [branch for block in decoder.stack for branch in block.branches]
    return [p.detach() for part in (decoder.vocabulary, *branches, decoder.norm) for p in part.parameters()]


@pytest.mark.axes(residual="dar-block", feedforward="dense")
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_seed_gives_the_same_branches_under_every_method(residual: str, feedforward: str):
    config = model_config(feedforward)
    wanted = shared_weights(build_decoder(config, RESIDUALS["standard"], seed=7))
    ours = build_decoder(config, RESIDUALS[residual], seed=7)
    assert all(torch.equal(a, b) for a, b in zip(shared_weights(ours), wanted, strict=True))
    again = build_decoder(config, RESIDUALS[residual], seed=7)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))
    other = shared_weights(build_decoder(config, RESIDUALS[residual], seed=8))
    assert not any(torch.equal(a, b) for a, b in zip(other, wanted, strict=True) if a.dim() > 1)  # norms are all ones


def held(decoder: Decoder) -> list[dict[str, int]]:
    """What every module has on `self`: names and identities."""
    return [{name: id(value) for name, value in vars(module).items()} for module in decoder.modules()]


@pytest.mark.axes(residual="dar-block", feedforward="dense")
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_state_dict_is_the_parameters(residual: str, feedforward: str):
    decoder = stirred(model_config(feedforward), RESIDUALS[residual])
    before = held(decoder)
    decoder(random_tokens())
    assert held(decoder) == before  # a forward pass leaves nothing behind
    state = decoder.state_dict()
    assert state.keys() == {name for name, _ in decoder.named_parameters()}
    assert not list(decoder.buffers())
    places = re.compile(r"(vocabulary\.|norm\.weight$|stack\.readout\.|stack\.blocks\.\d+\.(branches\.\d+|pathway)\.)")
    assert [name for name in state if not places.match(name)] == []

    fresh = build_decoder(model_config(feedforward), RESIDUALS[residual], seed=1)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(random_tokens()), decoder(random_tokens()))


# Rounding to bfloat16 (8 bits) is off by 2⁻⁸/√12 ≈ 1e-3 of a value, relative RMS, to float32 by 2e-8. Every weight,
# branch output and stored state is rounded, some fifty roundings in a row: √50 · 1e-3 ≈ 0.7 percent; measured 0.7 to
# 1.2 percent over all rows, and 2e-7 to 4e-7 against float64. Weights stay near their start: far from it the network
# itself multiplies a difference by a hundred. All experts are active: which one a rounded router leaves out is not a
# matter of precision.
FORMATS = [
    pytest.param(torch.float64, 1e-6, id="float64"),
    pytest.param(torch.bfloat16, 0.02, id="bfloat16"),
]


@pytest.mark.axes(residual="dar-block", feedforward="dense", dtype=torch.bfloat16)
@pytest.mark.parametrize(("dtype", "tolerance"), FORMATS)
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("residual", RESIDUALS)
@torch.no_grad()
def test_number_formats(residual: str, feedforward: str, dtype: torch.dtype, tolerance: float):
    changes = {"moe": MoEConfig(experts=4, active=4, expert_width=24)} if feedforward == "moe" else {}
    decoder = stirred(model_config(feedforward, **changes), RESIDUALS[residual], noise=0.06)
    wanted = decoder(random_tokens())
    ours = decoder.to(dtype)(random_tokens())
    assert ours.dtype == dtype
    assert ours.isfinite().all()
    assert relative_error(ours, wanted) < tolerance

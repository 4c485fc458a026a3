"""Where every method starts: gates, queries, transport and the spread of the weights."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dualres.config.schema import ResidualConfig
from dualres.model.decoder import Decoder, build_decoder
from dualres.residual.attnres import FullMap, LowRankMap
from dualres.residual.dar import Dual, GateSet
from dualres.residual.gate import Gate
from dualres.residual.hyper_connections import HyperConnections
from dualres.residual.retrieval import Queries, RetrievalPathway, RetrievalReadout
from tests.small import RESIDUALS, model_config, next_token_loss, random_tokens

STATE = torch.randn(2, 3, 5, 32, generator=torch.Generator().manual_seed(0))


def start_of(config: ResidualConfig, **changes: Any) -> Decoder:
    return build_decoder(model_config(**changes), config)


def test_dar():
    """α = ½, β = 1, ρ = σ(2), before the input has a say."""
    decoder = start_of(ResidualConfig("dar-block", gate_scale=0.0))
    for block in decoder.stack:
        assert isinstance(block.pathway, Dual)
        for gates in block.pathway.gates:
            assert isinstance(gates, GateSet)
            torch.testing.assert_close(torch.sigmoid(gates.alpha(STATE)), torch.full((2, 3, 5), 0.5))
            torch.testing.assert_close(2 * torch.sigmoid(gates.beta(STATE)), torch.ones(2, 3, 5))
            if gates.rho is not None:
                keep = 1 / (1 + math.exp(-2))
                torch.testing.assert_close(torch.sigmoid(gates.rho(STATE)), torch.full((1, 3, 5), keep))


def test_rho_bias_is_a_choice():
    decoder = start_of(ResidualConfig("dar-full", rho_bias=-1.5))
    found = [gate for name, gate in decoder.named_parameters() if name.endswith("rho.bias")]
    assert [gate.item() for gate in found] == [-1.5] * len(found)
    assert len(found) == 5


@pytest.mark.parametrize("streams", [2, 4])
def test_mhc(streams: int):
    """H_pre = ½, H_post = 1, H_res near the identity."""
    decoder = start_of(ResidualConfig("mhc", streams=streams, gate_scale=0.0))
    state = STATE[:1].expand(streams, -1, -1, -1)
    pathway = next(iter(decoder.stack)).pathway
    assert isinstance(pathway, HyperConnections)
    h, left = pathway.read(pathway.open((state,)), 0)
    torch.testing.assert_close(h, 0.5 * streams * state[0])
    mixing, post = left.live.coefficients[:-1], left.live.coefficients[-1]  # the streams are still their own sum
    torch.testing.assert_close(post, torch.ones_like(post))
    identity = torch.eye(streams)[:, :, None, None].expand_as(mixing)
    torch.testing.assert_close(mixing, identity, rtol=0, atol=streams * math.exp(-8))
    assert (mixing[0, 1] > 0).all()


@pytest.mark.parametrize(("method", "scale"), [("dar-block", 1.0), ("mhc", 0.01)])
def test_gate_scale_and_weights(method: str, scale: float):
    gates = [m for m in start_of(ResidualConfig(method)).modules() if isinstance(m, Gate)]
    assert {round(gate.scale.item(), 6) for gate in gates} == {scale}
    weights = torch.cat([gate.weight.flatten() for gate in gates])
    assert 0.019 < weights.std().item() < 0.021
    assert abs(weights.mean().item()) < 0.001


@pytest.mark.parametrize("method", ["attnres-block", "attnres-full", "dar-block", "dar-crossv"])
def test_queries_are_zero(method: str):
    queries = [m for m in start_of(ResidualConfig(method)).modules() if isinstance(m, Queries)]
    assert queries
    assert not any(q.weight.any() for q in queries)


@pytest.mark.parametrize("rank", [0, 4])
def test_value_maps_are_the_identity(rank: int):
    decoder = start_of(ResidualConfig("attnres-vproj", value_rank=rank))
    maps = [m for m in decoder.modules() if isinstance(m, FullMap | LowRankMap)]
    assert len(maps) == 10
    assert all(torch.equal(m(STATE), STATE) for m in maps)


@pytest.mark.parametrize("feedforward", ["dense", "moe"])
@pytest.mark.parametrize("build", [build_decoder, Decoder], ids=["build_decoder", "Decoder"])
def test_backbone_weights(build: type[Decoder], feedforward: str):
    """N(0, init_std) whichever way a decoder is made; norms start at one."""
    decoder = build(model_config(feedforward, init_std=0.05), ResidualConfig("standard"))
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            assert 0.04 < parameter.std().item() < 0.06, name
            assert parameter.abs().max() < 0.5, name


def test_eps_reaches_every_norm():
    """Of branches, output, depth keys and gate inputs."""
    for method in ("dar-block", "attnres-full", "mhc"):
        decoder = start_of(ResidualConfig(method), norm_eps=0.125)
        norms = [
            m.eps
            for m in decoder.modules()
            if isinstance(m, torch.nn.RMSNorm | Gate | RetrievalPathway | RetrievalReadout)
        ]
        assert set(norms) == {0.125}
        assert len(norms) > 11


def test_eps_matters_to_depth_scores():
    decoder = start_of(ResidualConfig("attnres-full"))
    other = start_of(ResidualConfig("attnres-full"))
    tokens = torch.arange(7)[None]

    def logits(model: Decoder, eps: float) -> Tensor:
        for module in model.modules():
            if isinstance(module, Queries):
                torch.nn.init.constant_(module.weight, 0.5)
            if isinstance(module, RetrievalPathway | RetrievalReadout):
                module.eps = eps
        return model(tokens)

    assert not torch.allclose(logits(decoder, 1e-6), logits(other, 1.0))


LEARNING = {**RESIDUALS, "attnres-vproj, rank 4": ResidualConfig("attnres-vproj", value_rank=4)}


@pytest.mark.parametrize("name", LEARNING)
def test_everything_learns_from_the_start(name: str):
    """No parameter of a pathway stays where it was: a start from which a gradient is zero for ever would be one."""
    decoder = start_of(LEARNING[name])
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2, eps=1e-20, weight_decay=0.0)  # any gradient moves
    still = set(dict(decoder.named_parameters()))
    for step in range(4):
        before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
        tokens = random_tokens(seed=step)
        next_token_loss(decoder(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        still -= {n for n, p in decoder.named_parameters() if (p - before[n]).abs().max() > 1e-3}
    assert not {n for n in still if "blocks.0.pathway.mixing.0" not in n}  # mHC mixes equal streams there

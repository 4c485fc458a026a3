"""Every method computes what the paper's equations say: logits against the NumPy float64 oracle in equations.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from dualres.config.schema import ModelConfig, ResidualConfig
from tests import equations
from tests.equations import Network
from tests.small import RESIDUALS, model_config, random_tokens, relative_error, stirred

TOLERANCE = 1e-10
DEFAULT_BRANCHES_PER_BLOCK = {"attnres-full": 1, "attnres-vproj": 1}  # elsewhere 2

# id -> feed-forward, layers, residual
ROWS: dict[str, tuple[str, int, ResidualConfig]] = {
    **{f"{name}-{kind}": (kind, 5, residual) for name, residual in RESIDUALS.items() for kind in ("dense", "moe")},
    **{
        f"{method}-{k}-layers-per-block": ("dense", 5, ResidualConfig(method, branches_per_block=2 * k))
        for method in ("dar-block", "attnres-block")
        for k in (1, 2, 3)
    },
    # A block of three branches: every other block begins with a feed-forward.
    **{
        f"{method}-three-branches-{kind}": (
            "dense",
            4,
            ResidualConfig(method, branches_per_block=3, share_parameters=shared),
        )
        for method in ("dar-block", "attnres-block")
        for kind, shared in (("shared", True), ("own", False))
    },
    **{
        f"{method}-set-per-branch": ("dense", 5, ResidualConfig(method, branches_per_block=4, share_parameters=False))
        for method in ("dar-block", "attnres-block")
    },
    "attnres-block-lone-last-branch": ("dense", 5, ResidualConfig("attnres-block", branches_per_block=3)),
    "attnres-block-one-block": ("dense", 3, ResidualConfig("attnres-block", branches_per_block=6)),
    "dar-block-one-block": ("dense", 3, ResidualConfig("dar-block", branches_per_block=6)),
    "attnres-full-layer-blocks": ("dense", 5, ResidualConfig("attnres-full", branches_per_block=2)),
    "attnres-vproj-layer-blocks": ("dense", 5, ResidualConfig("attnres-vproj", branches_per_block=2)),
    "attnres-vproj-rank-3": ("dense", 5, ResidualConfig("attnres-vproj", value_rank=3)),
    "attnres-vproj-layer-blocks-rank-3": (
        "dense",
        5,
        ResidualConfig("attnres-vproj", branches_per_block=2, value_rank=3),
    ),
    "mhc-3": ("dense", 5, ResidualConfig("mhc", streams=3)),
    "mhc-3-two-sinkhorn-steps": ("dense", 5, ResidualConfig("mhc", streams=3, sinkhorn_steps=2)),
}


class Recording(dict[str, equations.Array]):
    """Weights that remember which of them were read."""

    def __init__(self, weights):
        super().__init__(weights)
        self.read: set[str] = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)


def network(model: ModelConfig, residual: ResidualConfig) -> Network:
    """The same network in the oracle's words."""
    family, _, variant = residual.method.partition("-")
    options = dict(residual.options)
    return Network(
        family=family,
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        branches_per_block=residual.branches_per_block or DEFAULT_BRANCHES_PER_BLOCK.get(residual.method, 2),
        share_parameters=options.get("share_parameters", True),
        route=variant if variant in equations.ROUTES else "dar",
        streams=options.get("streams", 1),
        sinkhorn_steps=options.get("sinkhorn_steps", 20),
        active=model.moe.active if model.moe else 0,
        rope_base=model.rope_base,
        eps=model.norm_eps,
    )


def build(row):
    """-> tokens (B,T), the model's logits, its weights, the oracle's network"""
    kind, layers, residual = ROWS[row]
    model = model_config(kind, layers=layers)
    decoder = stirred(model, residual).double()
    tokens = random_tokens(batch=2, length=7)
    with torch.no_grad():
        ours = decoder(tokens)
    weights = Recording({name: tensor.numpy() for name, tensor in decoder.state_dict().items()})
    return tokens.numpy(), ours, weights, network(model, residual)


def oracle(tokens, weights, net) -> torch.Tensor:
    return torch.from_numpy(equations.logits(weights, tokens, net))


@pytest.mark.parametrize("row", ROWS)
def test_logits_are_those_of_the_equations(row):
    tokens, ours, weights, net = build(row)
    assert ours.dtype == torch.float64
    assert relative_error(ours, oracle(tokens, weights, net)) < TOLERANCE
    assert weights.read == set(weights), "the equations do not use every parameter"


@pytest.mark.parametrize("row", ["dar-block-dense", "dar-selfkv-dense", "dar-fixedkv-dense", "dar-crossv-dense"])
def test_another_route_gives_other_logits(row):
    tokens, ours, weights, net = build(row)
    for route in set(equations.ROUTES) - {net.route}:
        assert relative_error(ours, oracle(tokens, weights, replace(net, route=route))) > 1e-2, route


@pytest.mark.parametrize("wrong", [{"sinkhorn_steps": 19}, {"eps": 1.1e-6}, {"rope_base": 10_001.0}], ids=str)
def test_a_small_mistake_shows(wrong):
    tokens, ours, weights, net = build("mhc-4-dense")
    assert relative_error(ours, oracle(tokens, weights, replace(net, **wrong))) > 100 * TOLERANCE


def test_the_oracle_is_causal():
    tokens, _, weights, net = build("dar-block-dense")
    changed = tokens.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 97
    before, after = (equations.logits(weights, each, net) for each in (tokens, changed))
    np.testing.assert_array_equal(before[:, :-1], after[:, :-1])
    assert not np.allclose(before[:, -1], after[:, -1])

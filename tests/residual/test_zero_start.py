"""At the start, queries zero and gate scales zero, every method computes what the standard Transformer computes."""

import dataclasses

import pytest
import torch

from dualres.config.schema import ResidualConfig
from dualres.model.decoder import build_decoder
from dualres.residual import registry
from tests.small import FEEDFORWARDS, RESIDUALS, model_config, random_tokens, relative_error

METHODS = {
    **{name: config for name, config in RESIDUALS.items() if name != "standard"},
    "mhc-3": ResidualConfig("mhc", streams=3),
    "attnres-vproj-low-rank": ResidualConfig("attnres-vproj", value_rank=4),
    "attnres-block-3-branches": ResidualConfig("attnres-block", branches_per_block=3),
    "dar-block-own-sets": ResidualConfig("dar-block", branches_per_block=4, share_parameters=False),
    "dar-block-1": ResidualConfig("dar-block", branches_per_block=2),
}


def gates_closed(config: ResidualConfig) -> ResidualConfig:
    has_gates = "gate_scale" in registry.resolve(config)
    return ResidualConfig(**{**config.to_dict(), "gate_scale": 0.0}) if has_gates else config


@pytest.mark.axes(name="dar-block", feedforward="dense", layers=7)
@pytest.mark.parametrize("layers", [2, 7, 20])
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("name", METHODS)
def test_equals_standard(name: str, feedforward: str, layers: int):
    model = model_config(feedforward, layers=layers, width=16, norm_eps=1e-30, init_std=0.2)
    tokens = random_tokens(2, 11)
    standard = build_decoder(model, ResidualConfig("standard"), seed=3).double()
    method = build_decoder(model, gates_closed(METHODS[name]), seed=3).double()
    with torch.no_grad():
        assert relative_error(method(tokens), standard(tokens)) < 1e-6


@pytest.mark.axes(name="dar-block", feedforward="dense")
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("name", METHODS)
def test_equals_standard_with_the_eps_of_its_reads(name: str, feedforward: str):
    """An eps as large as the states: each norm must get its own."""
    model = model_config(feedforward, layers=7, width=16, norm_eps=0.3, init_std=0.2)
    tokens = random_tokens(2, 11)
    standard = build_decoder(model, ResidualConfig("standard"), seed=3).double()
    divisors = build_decoder(model, gates_closed(METHODS[name]), device="meta").stack.start_divisors()
    exact = dataclasses.replace(model, read_eps=tuple(model.norm_eps / c**2 for c in divisors))
    method = build_decoder(exact, gates_closed(METHODS[name]), seed=3).double()
    plain = build_decoder(model, gates_closed(METHODS[name]), seed=3).double()
    with torch.no_grad():
        wanted = standard(tokens)
        assert relative_error(method(tokens), wanted) < 1e-6
        assert relative_error(plain(tokens), wanted) > 1e-2


@pytest.mark.parametrize("name", ["mhc-4", "dar-block", "dar-full", "attnres-block"])
def test_differs_from_standard_once_it_is_stirred(name: str):
    """The test above could not fail if the pathway were ignored."""
    model = model_config(layers=7, width=16, norm_eps=1e-30, init_std=0.2)
    tokens = random_tokens(2, 11)
    standard = build_decoder(model, ResidualConfig("standard"), seed=3).double()
    method = build_decoder(model, gates_closed(METHODS[name]), seed=3).double()
    with torch.no_grad():
        for parameter in [
            p for n, p in method.named_parameters() if "pathway" in n and ("bias" in n or "queries" in n)
        ]:
            parameter.add_(torch.randn_like(parameter))
        assert relative_error(method(tokens), standard(tokens)) > 1e-2

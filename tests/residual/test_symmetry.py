"""The symmetry trap: equal streams with equal gradients would stay equal for ever. Random gate weights open it."""

import pytest
import torch
from torch import Tensor

from dualres.config.schema import ResidualConfig
from dualres.model.decoder import Decoder, build_decoder
from dualres.residual.gate import Gate
from tests.small import model_config, next_token_loss, real_text

METHODS = {
    "dar-block": ResidualConfig("dar-block", branches_per_block=4, gate_scale=0.0),
    "dar-full": ResidualConfig("dar-full", gate_scale=0.0),
    "mhc-2": ResidualConfig("mhc", streams=2, gate_scale=0.0),
    "mhc-4": ResidualConfig("mhc", streams=4, gate_scale=0.0),
}


def stream_difference(decoder: Decoder, tokens: Tensor) -> float:
    """‖x⁰ − x^j‖ / ‖x⁰‖, the largest over the block states H_b and the other streams."""
    states: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _, __, found: states.append(found[0])) for block in decoder.stack]
    with torch.no_grad():
        decoder(tokens)
    for hook in hooks:
        hook.remove()
    return max(float((state[0] - other).norm() / state[0].norm()) for state in states for other in state[1:])


def train(decoder: Decoder, steps: int) -> None:
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for step in range(steps):
        tokens = real_text(8, 64, step)
        optimizer.zero_grad()
        next_token_loss(decoder(tokens), tokens).backward()
        optimizer.step()


@pytest.mark.parametrize("name", METHODS)
def test_streams_separate(name: str):
    decoder = build_decoder(model_config(vocab_size=256), METHODS[name])
    probe = real_text(2, 64, 100)
    # mHC sums what was written with other coefficients for each stream: equal but for rounding.
    assert stream_difference(decoder, probe) <= (1e-6 if name.startswith("mhc") else 0.0)
    train(decoder, 20)
    assert stream_difference(decoder, probe) > 1e-3


@pytest.mark.parametrize("name", ["dar-block", "mhc-4"])
def test_streams_never_separate_from_zero_gate_weights(name: str):
    """In float64: rounding, which differs by stream in mHC-4, is a difference too, and AdamW would blow it up."""
    decoder = build_decoder(model_config(vocab_size=256), METHODS[name]).double()
    for module in decoder.modules():
        if isinstance(module, Gate):
            torch.nn.init.zeros_(module.weight)
            torch.nn.init.ones_(module.scale)  # so that the gate weights do learn, and still learn alike
    train(decoder, 20)
    assert stream_difference(decoder, real_text(2, 64, 100)) < 1e-6

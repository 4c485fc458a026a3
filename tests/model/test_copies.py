"""A copy, a pickle or a loaded `state_dict` of a compiled or recomputing model is a model of its own."""

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from dualres.model.block import Recompute, ResidualBlock, compile_blocks, recompute_blocks
from dualres.model.decoder import Decoder
from tests.small import RESIDUALS, gradients, model_config, next_token_loss, random_tokens, stirred

TOKENS = random_tokens(2, 7)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(), torch._functorch.config.patch():  # what compile_blocks changes
        yield
    torch._dynamo.reset()


def pickled(decoder: Decoder) -> Decoder:
    file = io.BytesIO()
    torch.save(decoder, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def reloaded(decoder: Decoder) -> Decoder:
    other = stirred(decoder.config, decoder.residual_config, seed=5)
    other.load_state_dict(decoder.state_dict())
    return other


def outcome(decoder: Decoder) -> dict[str, Tensor]:
    decoder.zero_grad()
    logits = decoder(TOKENS)
    next_token_loss(logits, TOKENS).backward()
    return {"logits": logits.detach(), **gradients(decoder)}


def same(ours: dict[str, Tensor], wanted: dict[str, Tensor], bound: float = 0.0) -> bool:
    assert ours.keys() == wanted.keys()
    return all((ours[name] - wanted[name]).abs().max() <= bound * (1 + wanted[name].abs().max()) for name in wanted)


COPIES: dict[str, Callable[[Decoder], Decoder]] = {"deepcopy": copy.deepcopy, "pickle": pickled, "state_dict": reloaded}
ROWS = [
    *[pytest.param(residual, "none", None, "deepcopy", id=residual) for residual in RESIDUALS],
    pytest.param("dar-block", "selective", None, "deepcopy", id="dar-block-selective"),
    pytest.param("attnres-full", "full", None, "deepcopy", id="attnres-full-full"),
    *[pytest.param("dar-block", "none", None, copied, id=f"dar-block-{copied}") for copied in COPIES],
    *[pytest.param("dar-block", "none", "eager", copied, id=f"dar-block-compiled-{copied}") for copied in COPIES],
    pytest.param("standard", "full", "aot_eager", "deepcopy", id="standard-full-compiled"),
    pytest.param("mhc-2", "none", "aot_eager", "deepcopy", id="mhc-2-compiled", marks=pytest.mark.slow),
    pytest.param(
        "attnres-vproj", "selective", "aot_eager", "pickle", id="attnres-vproj-compiled", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("residual", "how", "backend", "copied"), ROWS)
def test_a_copy_has_its_own_weights(residual: str, how: Recompute, backend: str | None, copied: str):
    """As an average of weights or a teacher has: other weights give other outputs, and gradients arrive at the copy."""
    decoder = stirred(model_config(layers=3), RESIDUALS[residual], noise=0.1)
    names = decoder.state_dict().keys()
    recompute_blocks(decoder.stack, how)
    if backend is not None:
        compile_blocks(decoder.stack, backend=backend)
    wanted = outcome(decoder)
    assert decoder.state_dict().keys() == names
    assert [name for name, _ in decoder.named_parameters()] == [*wanted][1:]

    other = COPIES[copied](decoder)
    decoder.zero_grad()
    assert other.state_dict().keys() == names
    rounding = 0.0 if backend is None else 1e-5  # compiled blocks add gradients in another order
    assert same(outcome(other), wanted, rounding)
    assert all(parameter.grad is None for parameter in decoder.parameters())
    if copied != "state_dict":
        assert {block.recompute for block in other.stack} == {how}
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    assert not same(outcome(other), wanted, 1e-3)
    assert same(outcome(decoder), wanted)


def test_a_copy_of_a_compiled_block_runs_plain_code_until_it_is_compiled():
    """As a copy of a module that its own `compile` compiled."""
    seen: list[int] = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        seen.append(len(example))
        return graph.forward

    torch_own = nn.Linear(3, 3)
    torch_own.compile(backend=backend)
    assert copy.deepcopy(torch_own)._compiled_call_impl is None

    decoder = stirred(model_config(layers=3), RESIDUALS["dar-full"])
    compile_blocks(decoder.stack, backend=backend)
    copies = [copy.deepcopy(decoder), pickled(decoder), copy.copy(next(iter(decoder.stack)))]
    wanted = copies[0](TOKENS)
    assert torch.equal(copies[1](TOKENS), wanted)
    assert not seen
    for made in copies:
        for block in made.modules():
            assert not isinstance(block, ResidualBlock) or block.compiled_run is None
    compile_blocks(cast(Any, copies[0]).stack, backend=backend)
    assert torch.equal(copies[0](TOKENS), wanted)
    assert len(seen) == 1  # all blocks share a graph

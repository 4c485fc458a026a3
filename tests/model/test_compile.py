"""`torch.compile` without graph breaks, of the whole decoder and of every block, changes nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit

from dualres.model.attention import RouterReport
from dualres.model.block import compile_blocks
from dualres.model.decoder import Decoder
from tests.small import (
    RESIDUALS,
    gradients,
    model_config,
    next_token_loss,
    random_tokens,
    relative_error,
    stirred,
)

DEFAULT_LIMIT = 8  # of PyTorch: how often it compiles one function anew
BLOCKS = 12  # more than that limit, and than the 10 of the paper's 1B model
SHAPE = 2, 7  # (B,T)

Outcome = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    limits = torch._dynamo.config.patch(recompile_limit=DEFAULT_LIMIT, accumulated_recompile_limit=256)
    backward = torch._functorch.config.patch(backward_pass_autocast="same_as_forward")
    with limits, backward:  # the defaults, which compile_blocks changes
        yield
    torch._dynamo.reset()


def decoder_of(residual: str, feedforward: str = "dense", layers: int = 2, **options: Any) -> Decoder:
    if residual.startswith("mhc"):
        options.setdefault("sinkhorn_steps", 2)  # of 20, which are copies of each other in the graph
    model = model_config(feedforward, layers=layers, width=16, heads=2, kv_heads=1)
    return stirred(model, dataclasses.replace(RESIDUALS[residual], **options))


def blocks_of(residual: str, blocks: int, feedforward: str = "dense", **options: Any) -> Decoder:
    """A decoder of so many blocks, each as small as the method has them."""
    single = residual in ("attnres-full", "attnres-vproj")  # one branch per block
    options |= {"branches_per_block": 2} if residual.endswith("-block") else {}
    decoder = decoder_of(residual, feedforward, blocks // 2 if single else blocks, **options)
    assert len(decoder.stack.blocks) == blocks
    return decoder


def outcome(
    decoder: Decoder, run: Callable[..., Tensor], shape: tuple[int, int] = SHAPE, autocast: bool = False
) -> Outcome:
    """Logits, router losses and all gradients of one step of `run`, which is `decoder` or its compiled form."""
    tokens, report = random_tokens(*shape), RouterReport()
    decoder.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = run(tokens, report=report) if decoder.config.moe else run(tokens)
    next_token_loss(logits, tokens).backward()
    losses = {f"router loss of layer {layer}": loss for layer, loss in report.losses.items()}
    assert len(losses) == (decoder.config.layers if decoder.config.moe else 0)
    return {"logits": logits.detach(), **losses, **gradients(decoder)}


def differing(ours: Outcome, wanted: Outcome, rtol: float = 0.0, atol: float = 0.0) -> list[str]:
    """The names of what is not equal, to the bit unless told otherwise."""
    assert ours.keys() == wanted.keys()
    return [
        f"{name} by {(ours[name] - wanted[name]).abs().max():.1e} of {wanted[name].abs().max():.1e}"
        for name in wanted
        if not torch.allclose(ours[name], wanted[name], rtol, atol)
    ]


slow = pytest.mark.slow
KINDS = ["standard", "mhc-4", "attnres-block", "attnres-vproj", "dar-block"]  # the other rows differ from these in data


@pytest.mark.parametrize("residual", KINDS)
def test_whole_decoder(residual: str):
    decoder = decoder_of(residual, layers=3 if residual == "dar-block" else 2)  # three: the last block is shorter
    wanted = outcome(decoder, decoder)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    assert not differing(outcome(decoder, compiled), wanted)


@pytest.mark.parametrize(
    "residual",
    [pytest.param(name, marks=slow if name == "dar-block" else pytest.mark.exhaustive) for name in RESIDUALS],
)
def test_deep_decoder(residual: str):
    options: dict[str, Any] = {"sinkhorn_steps": 20} if residual == "mhc-4" else {}  # the paper's, once
    decoder = blocks_of(residual, BLOCKS, **options)
    wanted = outcome(decoder, decoder)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    assert not differing(outcome(decoder, compiled), wanted)


MOE = [
    pytest.param("standard", 2, torch.float32, id="standard"),
    pytest.param("standard", 2, torch.bfloat16, id="standard-bfloat16"),
    pytest.param("dar-block", 2, torch.float32, id="dar-block"),
    *[
        pytest.param(residual, BLOCKS, torch.float32, id=f"{residual}-deep", marks=slow)
        for residual in ("standard", "mhc-4", "attnres-block", "dar-block")
    ],
]


@pytest.mark.parametrize(("residual", "blocks", "dtype"), MOE)
def test_whole_moe_decoder(residual: str, blocks: int, dtype: torch.dtype):
    decoder = blocks_of(residual, blocks, "moe").to(dtype)
    wanted = outcome(decoder, decoder)
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    assert not differing(outcome(decoder, compiled), wanted)


@pytest.mark.parametrize(("residual", "feedforward"), [("dar-block", "dense"), ("standard", "moe")])
def test_autocast(residual: str, feedforward: str):
    """PyTorch's default compiles the backward pass under autocast too, and would round the gradients of all scores and
    gates; eager mode does not."""
    decoder = blocks_of(residual, 2, feedforward)
    wanted = outcome(decoder, decoder, autocast=True)
    assert wanted["logits"].dtype == torch.bfloat16
    compiled = torch.compile(decoder, fullgraph=True, backend="aot_eager")
    with torch._functorch.config.patch(backward_pass_autocast="off"):
        assert not differing(outcome(decoder, compiled, autocast=True), wanted)


def test_blocks_under_autocast():
    decoder = blocks_of("attnres-block", 2, "moe")  # the router's product is not in a fused operator
    wanted = outcome(decoder, decoder, autocast=True)
    compile_blocks(decoder.stack, fullgraph=True, backend="aot_eager")
    # Gradients are added in another order, all in float32; scores in bfloat16 would be off by a percent.
    assert not differing(outcome(decoder, decoder, autocast=True), wanted, rtol=1e-4, atol=1e-6)


@slow
@pytest.mark.parametrize("residual", ["standard", "dar-block"])
def test_other_shapes(residual: str):
    """A second batch and length make PyTorch compile for any; a batch of one is special to it."""
    decoder = blocks_of(residual, 2)
    compiled = torch.compile(decoder, fullgraph=True, backend="eager")
    for shape in [SHAPE, (3, 9), (5, 13), (1, 13)]:
        assert not differing(outcome(decoder, compiled, shape), outcome(decoder, decoder, shape)), shape


@pytest.mark.parametrize(
    ("residual", "blocks"),
    [
        pytest.param("dar-block", 3, id="dar-block", marks=slow),
        pytest.param("dar-block", BLOCKS, id="dar-block-deep", marks=pytest.mark.exhaustive),
        pytest.param("standard", BLOCKS, id="standard-deep", marks=pytest.mark.exhaustive),
    ],
)
def test_inductor(residual: str, blocks: int):
    """In float64: layers with weights far from their start multiply a rounding error, twelve of them by a hundred."""
    decoder = blocks_of(residual, blocks).double()
    wanted = outcome(decoder, decoder)
    compiled = torch.compile(decoder, fullgraph=True, backend="inductor")
    assert not differing(outcome(decoder, compiled), wanted, rtol=1e-9, atol=1e-12)


@slow
@pytest.mark.parametrize("residual", ["attnres-block", "dar-block", "mhc-4"])
def test_inductor_around_kernels(residual: str):
    """In float32, where the fused operators run."""
    decoder = blocks_of(residual, 2)
    wanted = outcome(decoder, decoder)
    ours = outcome(decoder, torch.compile(decoder, fullgraph=True, backend="inductor"))
    assert relative_error(ours["logits"], wanted["logits"]) < 1e-5
    assert relative_error(*(torch.cat([x.flatten() for x in each.values()]) for each in (ours, wanted))) < 1e-5


BY_BLOCK = [
    pytest.param("standard", "aot_eager", id="standard-aot_eager"),
    pytest.param("dar-block", "eager", id="dar-block-eager", marks=pytest.mark.exhaustive),  # aot_eager traces it too
    pytest.param("dar-block", "aot_eager", id="dar-block-aot_eager", marks=slow),
    # test_blocks_under_autocast compiles two blocks of it, and those of dar-block read the same way.
    pytest.param("attnres-block", "aot_eager", id="attnres-block-aot_eager", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize(("residual", "backend"), BY_BLOCK)
def test_blocks(residual: str, backend: str):
    """A block adds up the gradients of a state it reads several times before it hands them on: another order than
    eager mode has. In float64, because some of these sums nearly cancel."""
    decoder = blocks_of(residual, BLOCKS).double()
    wanted = outcome(decoder, decoder)
    compile_blocks(decoder.stack, fullgraph=True, backend=backend)
    assert not differing(outcome(decoder, decoder), wanted, rtol=1e-9, atol=1e-12)


@slow
def test_moe_blocks_report_their_own_layer():
    decoder = blocks_of("standard", BLOCKS, "moe").bfloat16()
    wanted = outcome(decoder, decoder)
    compile_blocks(decoder.stack, fullgraph=True, backend="eager")
    assert not differing(outcome(decoder, decoder), wanted)


def test_blocks_exceed_the_default_limit():
    """What `compile_blocks` raises the limit for, and that the tests above would notice if it did not."""
    decoder = blocks_of("attnres-full", BLOCKS)
    for block in decoder.stack:
        block.compile(fullgraph=True, backend="eager")
    with pytest.raises(FailOnRecompileLimitHit):
        decoder(random_tokens(*SHAPE))


@slow
def test_blocks_train_validate_and_change_shape():
    """Each of these compiles every block once more."""
    decoder = blocks_of("attnres-full", BLOCKS)
    wanted = outcome(decoder, decoder, (3, 9))
    compile_blocks(decoder.stack, fullgraph=True, backend="eager", dynamic=False)
    outcome(decoder, decoder, SHAPE)
    with torch.no_grad():
        decoder(random_tokens(*SHAPE))
    assert not differing(outcome(decoder, decoder, (3, 9)), wanted)

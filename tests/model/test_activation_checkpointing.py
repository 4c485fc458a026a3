"""Activation recomputation of every block changes no bit and keeps less for the backward pass."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy

from dualres.model.attention import RouterReport
from dualres.model.block import (
    NormedBranch,
    Recompute,
    ResidualStack,
    compile_blocks,
    keep_products,
    recompute_blocks,
    residual_stack,
)
from dualres.model.decoder import Decoder
from tests.small import FEEDFORWARDS, RESIDUALS, model_config, next_token_loss, random_tokens, stirred


@contextlib.contextmanager
def kept_by(module: nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """What is kept for the backward pass, without parameters: the storages themselves, so that no address is reused."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield kept


def size_of(kept: dict[int, torch.UntypedStorage]) -> int:
    """In bytes."""
    return sum(storage.nbytes() for storage in kept.values())


class Step(NamedTuple):
    losses: list[Tensor]
    reports: list[RouterReport]
    gradients: list[Tensor]  # in the order of the parameters: the wrapper changes their names
    kept: int  # bytes kept for the backward pass, without parameters


def step(decoder: Decoder) -> Step:
    """Two micro-batches, both forward before any backward, as a pipeline does: a state kept on `self` would mix them.

    The first goes backward last, and is then recomputed after the second.
    """
    losses, reports = [], []
    with kept_by(decoder) as kept:
        for seed in (0, 1):
            tokens, report = random_tokens(seed=seed), RouterReport()
            losses.append(next_token_loss(decoder(tokens, report=report), tokens))
            reports.append(report)
    size = size_of(kept)
    for loss in reversed(losses):
        loss.backward()
    gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
    assert len(gradients) == len(list(decoder.parameters()))
    return Step([loss.detach() for loss in losses], reports, gradients, size)


def wrap(decoder: Decoder) -> None:
    """As a user does who knows only PyTorch."""
    blocks = decoder.stack.blocks
    for i, block in enumerate(blocks):
        blocks[i] = checkpoint_wrapper(block)


# How, and the share of the plain step's bytes that may remain. In full: the history, the vocabulary and the readout,
# less than half whatever the pathway. Selective keeps the products too.
WAYS = [
    pytest.param(lambda decoder: recompute_blocks(decoder.stack, "full"), 1 / 2, id="full"),
    pytest.param(lambda decoder: recompute_blocks(decoder.stack, "selective"), 0.75, id="selective"),
    pytest.param(wrap, 1 / 2, id="wrapped"),
]


@pytest.mark.axes(residual="dar-block", feedforward="dense", share=0.75)
@pytest.mark.parametrize(("recompute", "share"), WAYS)
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("residual", RESIDUALS)
def test_recomputed_blocks(residual: str, feedforward: str, recompute: Callable[[Decoder], None], share: float):
    config = model_config(feedforward)
    plain = step(stirred(config, RESIDUALS[residual]))
    decoder = stirred(config, RESIDUALS[residual])
    recompute(decoder)
    recomputed = step(decoder)

    assert not torch.equal(*plain.losses)  # else mixing the micro-batches could not be seen
    for ours, wanted in zip(recomputed.losses, plain.losses, strict=True):
        assert torch.equal(ours, wanted)
    names = [name for name, _ in decoder.named_parameters()]
    for name, ours, wanted in zip(names, recomputed.gradients, plain.gradients, strict=True):
        assert torch.equal(ours, wanted), name
    layers = set(range(config.layers)) if feedforward == "moe" else set()
    for report, first in zip(recomputed.reports, plain.reports, strict=True):
        assert report.losses.keys() == layers  # counted once although computed twice
        assert all(torch.equal(report.losses[layer], first.losses[layer]) for layer in layers)
    assert recomputed.kept < plain.kept * share


def dropping(residual: str) -> ResidualStack:
    """Branches that drop half of what they compute, by turns with a norm that the pathway applies and their own."""
    width, generator = 32, torch.manual_seed(0)
    drop = [nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Dropout(), nn.Linear(24, width)) for _ in range(6)]
    branches: list[nn.Module] = [
        NormedBranch(nn.RMSNorm(width, eps=1e-6), module) if i % 2 else nn.Sequential(nn.LayerNorm(width), module)
        for i, module in enumerate(drop)
    ]
    stack = residual_stack(branches, width, RESIDUALS[residual])
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return stack


def step_of_dropping(residual: str, how: Recompute, backend: str | None) -> tuple[list[Tensor], int]:
    """Output, gradients, and the random number that is drawn next; the bytes kept for the backward pass."""
    stack = dropping(residual)
    recompute_blocks(stack, how)
    if backend is not None:
        torch._dynamo.reset()
        with torch._dynamo.config.patch(), torch._functorch.config.patch():
            compile_blocks(stack, backend=backend)
            return outcome_of_dropping(stack)
    return outcome_of_dropping(stack)


def outcome_of_dropping(stack: ResidualStack) -> tuple[list[Tensor], int]:
    torch.manual_seed(1)
    x = torch.randn(2, 7, 32)
    with kept_by(stack) as kept:
        outputs = [stack(x), stack(x)]
    size = size_of(kept)
    assert not torch.equal(*outputs)  # they drop
    sum(output.square().mean() for output in reversed(outputs)).backward()
    found = [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]
    assert len(found) == len(list(stack.parameters()))
    return [*outputs, *found, torch.rand(3)], size


# A kind with history and one without, both ways of recomputing, both backends.
SLOW = {("dar-full", "full", "inductor"), ("mhc-2", "selective", "inductor"), ("dar-full", "selective", "aot_eager")}
COMPILED = [
    pytest.param("dar-block", "full", "aot_eager", id="dar-block-full-aot_eager"),
    pytest.param("attnres-block", "selective", "aot_eager", id="attnres-block-selective-aot_eager"),
    *[
        pytest.param(*row, id="-".join(row), marks=pytest.mark.slow if row in SLOW else pytest.mark.exhaustive)
        for row in itertools.product(
            ("standard", "mhc-2", "attnres-vproj", "dar-full"), ("full", "selective"), ("aot_eager", "inductor")
        )
    ],
]


@pytest.mark.parametrize(
    ("residual", "how", "backend"),
    [pytest.param(r, how, None, id=f"{r}-{how}") for r in RESIDUALS for how in ("full", "selective")] + COMPILED,
)
def test_dropout_drops_the_same_again(residual: str, how: Recompute, backend: str | None):
    plain, all_kept = step_of_dropping(residual, "none", backend)
    recomputed, kept = step_of_dropping(residual, how, backend)
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(recomputed, plain, strict=True))
    assert kept < all_kept


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        ("_scaled_dot_product_flash_attention", lambda p: (0, 0, 0, p)),
        ("_scaled_dot_product_efficient_attention", lambda p: (0, 0, 0, None, True, p)),
        ("_scaled_dot_product_cudnn_attention", lambda p: (0, 0, 0, None, True, p)),
    ],
)
def test_attention_that_drops_weights_runs_again(operator: str, arguments: Callable[[float], tuple[Any, ...]]):
    """Only GPUs have such attention in one operator. Its kept result would leave the random state behind."""
    attention = getattr(torch.ops.aten, operator).default
    keep, again = CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    assert keep_products(None, attention, *arguments(0.0)) is keep
    assert keep_products(None, attention, *arguments(0.1)) is again
    assert keep_products(None, attention, 0, 0, 0) is keep
    assert keep_products(None, attention, 0, 0, 0, dropout_p=0.1) is again
    assert keep_products(None, torch.ops.aten.mm.default, 0, 0) is keep
    assert keep_products(None, torch.ops.aten.gelu.default, 0) is again

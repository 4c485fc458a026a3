"""Activation recomputation of every block changes no bit and keeps less for the backward pass."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dualres.model.attention import RouterReport
from dualres.model.block import recompute_blocks
from dualres.model.decoder import Decoder
from tests.small import FEEDFORWARDS, RESIDUALS, model_config, next_token_loss, random_tokens, stirred


class Step(NamedTuple):
    losses: list[Tensor]
    reports: list[RouterReport]
    gradients: list[Tensor]  # in the order of the parameters: the wrapper changes their names
    kept: int  # bytes kept for the backward pass, without parameters


def step(decoder: Decoder) -> Step:
    """Two micro-batches, both forward before any backward, as a pipeline does: a state kept on `self` would mix them.

    The first goes backward last, and is then recomputed after the second.
    """
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, Any] = {}  # the storages themselves, so that no address is used twice

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    losses, reports = [], []
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        for seed in (0, 1):
            tokens, report = random_tokens(seed=seed), RouterReport()
            losses.append(next_token_loss(decoder(tokens, report=report), tokens))
            reports.append(report)
    size = sum(storage.nbytes() for storage in kept.values())
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

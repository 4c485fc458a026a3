"""Seconds of a step against numbers by hand, for nano: 8 layers, width 96, keys of 48, hidden units of 256."""

import pytest

from dualres.config.loading import load_config
from dualres.parallel.mesh import mesh_of
from dualres.plan.estimate import StepEstimate, estimate
from dualres.plan.hardware import Hardware

MACHINE = Hardware(peak_flops=1e12, utilization=0.5)
ATTENTION = 2 * 96 * 96 + 2 * 96 * 48  # weights
LAYER = 2 * (ATTENTION + 3 * 96 * 256) + 4 * 96 * 257 / 2  # flops of a token forward: products, scores and values
LOGITS = 2 * 96 * 4096
TOKENS = 4 * 256  # of a micro-batch


def planned(scale: str, residual: str, processes: int, hardware: Hardware, *overrides: str) -> StepEstimate:
    given = ["train.micro_batch=4", "train.global_batch=32", "train.engine=fsdp2", *overrides]
    config = load_config(scale, residual, given)
    found = estimate(config, "fsdp2", mesh_of(config, processes), hardware).step
    assert found is not None
    return found


@pytest.mark.parametrize(("recompute", "times"), [("none", 3), ("selective", 3), ("full", 4)])
def test_products(recompute: str, times: int):
    found = planned("nano", "standard", 2, MACHINE, f"train.recompute={recompute}")
    flops = 4 * TOKENS * (times * 8 * LAYER + 3 * LOGITS)  # four micro-batches
    assert found.seconds.products == pytest.approx(flops / 0.5e12)
    needed = 3 * (8 * LAYER + LOGITS) * 32 * 256
    assert found.utilization == pytest.approx(needed / found.seconds.total / (2 * 1e12))


def test_a_short_block_has_fewer_products():
    """Blocks of 4, 4 and 1 layers on three ranks: the first two are slowest."""
    cut = [
        "model.layers=9",
        "residual.default_branches_per_block=8",
        "train.parallel.pipeline=3",
        "model.vocab_size=128",
    ]
    found = planned("nano", "dar-block", 3, MACHINE, *cut)
    assert found.seconds.products == pytest.approx(8 * TOKENS * 3 * 4 * LAYER / 0.5e12)


def test_the_bubble():
    """With links that take no time: 3/2 micro-batches of the last of four ranks, which has two chunks and the loss."""
    free = MACHINE._replace(memory_bandwidth=1e30, node_bandwidth=1e30, network_bandwidth=1e30)
    cut = ["train.parallel.pipeline=4", "train.parallel.virtual_stages=2"]
    found = planned("nano", "standard", 4, free, *cut)
    once = TOKENS * 3 * (2 * LAYER + LOGITS) / 0.5e12
    assert found.seconds.products == pytest.approx(8 * once)
    assert found.seconds.bubble == pytest.approx((4 - 1) / 2 * once)


def test_experts_are_sharded_over_a_ring_of_their_own():
    """Of eight ranks in nodes of two, two hold the same experts: no two of them share a node, and its two cards."""
    machine = Hardware(node_size=2, network_bandwidth=1e9, node_bandwidth=8e9, peak_flops=1e18, utilization=1)
    found = planned("nano-moe", "standard", 8, machine, "train.parallel.expert=4")
    layer = ATTENTION + 8 * 96 + 2 * 96  # with router and norms, on all eight
    root = 4096 * 96 + 96
    experts = 8 * 2 * 3 * 96 * 128  # two of each layer
    gathered, scattered = 4 * (2 * 8 * layer + root) * 7 / 8, 4 * (8 * layer + root) * 7 / 8  # float32
    assert found.communication[0].weights == gathered + 4 * 2 * experts / 2
    assert found.communication[0].gradients == scattered + 4 * experts / 2
    links = (gathered + scattered) / 2e9 + 4 * 3 * experts / 2 / 1e9
    assert found.seconds.sharding == pytest.approx(links - found.seconds.products)

"""The choice against all that could be chosen."""

import pytest

from dualres.config.loading import load_config
from dualres.plan.estimate import MeshEstimate, estimate
from dualres.plan.hardware import USABLE, Hardware
from dualres.plan.search import candidates, choose

BATCH = ["model.layers=5", "train.global_batch=52", "train.micro_batch=4"]
CASES = {
    "dense, short last block": ("nano", "dar-block", [], 4),
    "dense, large micro-batch": ("nano", "standard", ["train.micro_batch=13"], 2),
    "sparse": ("nano-moe", "dar-block", [], 8),
}
MACHINES = {
    "as an H100": Hardware(),
    "slow network": Hardware(node_size=2, network_bandwidth=1e9),
    "slow products": Hardware(peak_flops=1e12, node_size=4),
}


def place(found: MeshEstimate, wanted: int) -> tuple[float, bool, int]:
    """Fastest first, then the recipe's micro-batch, then the largest."""
    assert found.step is not None
    size = found.config.train.micro_batch
    return float(f"{found.step.seconds.total:.9g}"), size != wanted, -size


@pytest.mark.parametrize(("scale", "residual", "overrides", "processes"), CASES.values(), ids=CASES)
def test_the_choice_is_the_fastest_that_fits(scale: str, residual: str, overrides: list[str], processes: int):
    config = load_config(scale, residual, [*BATCH, *overrides])
    wanted = config.train.micro_batch
    for name, machine in MACHINES.items():
        every = [
            (row, estimate(row.config, row.config.train.engine, row.mesh, machine))
            for row in candidates(config, processes, machine, set())
        ]
        for row, found in every:
            assert row.seconds <= place(found, wanted)[0] * (1 + 1e-8), (name, row)
            assert row.memory <= found.peak_memory, (name, row)
        sizes = sorted(found.peak_memory for _, found in every)
        for limit in (sizes[-1], *sizes[:: max(1, len(sizes) // 4)]):  # none is too tight for the smallest
            small = machine._replace(memory=limit / USABLE * (1 + 1e-9))
            best = min(place(found, wanted) for _, found in every if found.fits(small))
            chosen = choose(config, processes, small)
            assert chosen.fits(small)
            assert place(chosen, wanted) == best, (name, limit)

"""The choice against all that could be chosen."""

import pytest

from dualres.config.loading import load_config
from dualres.plan.estimate import MeshEstimate, estimate
from dualres.plan.hardware import USABLE, Hardware
from dualres.plan.search import candidates, choose

BATCH = ["model.layers=5", "train.global_batch=52", "train.micro_batch=4"]
CASES = {
    "dense, short last block": ("nano", "dar-block", [], 4),
    "dense, large micro-batch": ("nano", "standard", ["train.micro_batch=13", "train.global_batch=26"], 2),
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


FAST = "dense, large micro-batch", "slow network"
PAIRS = [
    pytest.param(case, machine, id=f"{case}, {machine}", marks=[] if (case, machine) == FAST else pytest.mark.slow)
    for case in CASES
    for machine in MACHINES
]


@pytest.mark.parametrize(("case", "name"), PAIRS)
def test_the_choice_is_the_fastest_that_fits(case: str, name: str):
    (scale, residual, overrides, processes), machine = CASES[case], MACHINES[name]
    config = load_config(scale, residual, [*BATCH, *overrides])
    wanted = config.train.micro_batch
    every = [
        (row, estimate(row.config, row.config.train.engine, row.mesh, machine))
        for row in candidates(config, processes, machine, set())
    ]
    for row, found in every:
        assert found.step is not None
        assert row.seconds <= found.step.seconds.total * (1 + 1e-12), row
        assert row.memory <= found.peak_memory, row
    sizes = sorted(found.peak_memory for _, found in every)
    for limit in (sizes[-1], *sizes[:: max(1, len(sizes) // 4)]):  # none is too tight for the smallest
        small = machine._replace(memory=limit / USABLE * (1 + 1e-9))
        best = min(place(found, wanted) for _, found in every if found.fits(small))
        chosen = choose(config, processes, small)
        assert chosen.fits(small)
        assert place(chosen, wanted) == best, limit

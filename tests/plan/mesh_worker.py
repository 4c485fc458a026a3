"""Run by torchrun: one step of every case of a mesh, its bytes sent and its memory. See test_measured.py."""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dualres.config.schema import Config
from dualres.model import moe
from dualres.train.engines.base import Engine, MicroBatch
from dualres.train.engines.build import build_engine
from dualres.train.engines.fsdp import ShardedEngine
from dualres.train.process_group import World, join_world
from tests.plan.cases import MESHES, cases, config_of
from tests.plan.engine_memory import held_bytes, peak_bytes
from tests.plan.meter import Meter


def evenly(tokens: Tensor, weight: Tensor) -> Tensor:
    """Router logits that send each expert as many tokens, whatever these are. (N,D), (E,D) -> (N,E)"""
    logits = torch.nn.functional.linear(tokens.float(), weight.float())
    turn = torch.arange(len(tokens))[:, None] - torch.arange(len(weight))
    return 0 * logits - (turn % len(weight)).float()


def step(config: Config, engine: Engine) -> list[MicroBatch]:
    """This rank's micro-batches of a step."""
    train, ranks = config.train, engine.data_size
    count = train.global_batch // train.micro_batch
    shape = train.micro_batch, config.model.context + 1
    numbers = range(engine.data_rank, -(-count // ranks) * ranks, ranks)
    generator = torch.Generator().manual_seed(engine.data_rank)
    return [
        MicroBatch(torch.randint(0, config.model.vocab_size, shape, generator=generator), ranks / count)
        for _ in numbers
    ]


def measure(config: Config, world: World) -> dict[str, Any]:
    engine = build_engine(config, world, 256)
    assert isinstance(engine, ShardedEngine)
    batches = step(config, engine)
    for _ in range(2):  # the first may allocate what stays
        engine.accumulate(batches)
        engine.update(1e-3, 1.0)
    engine.accumulate(batches)
    held = held_bytes(engine)
    most = peak_bytes(engine, batches)
    engine.update(1e-3, 1.0)
    with Meter(engine.groups) as meter:
        engine.accumulate(batches)
        engine.update(1e-3, 1.0)
    return {
        "sent": dict(meter.sent),
        "calls": dict(meter.calls),
        "held": held,
        "most": most,
        "stage": engine.groups.stage,
    }


def main(mesh: str, out: Path) -> None:
    """OUT/RANK.json: for every case what was measured, or the error."""
    moe.router_logits = evenly
    found = {}
    with join_world("cpu") as world:
        for case in cases(MESHES[mesh]):
            try:
                found[case.name] = measure(config_of(case), world)
            except Exception:
                found[case.name] = {"error": traceback.format_exc()}
        (out / f"{world.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

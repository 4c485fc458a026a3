"""One of four processes that train every case of a mesh: started by torchrun from test_mesh_training.py.

Rank 0 writes FOLDER/results.json: of each case what went wrong in it, or nothing.
"""

import functools
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dualres.parallel.mesh import Mesh, make_groups
from dualres.train.engines import build
from dualres.train.engines.build import build_engine
from dualres.train.process_group import World, join_world
from tests.parallel.cases import (
    ACTIVE,
    MESHES,
    NEXT_SEED,
    SEEDS,
    Case,
    cases,
    config_of,
    default_dtype,
    differences,
    stirred_parts,
    train,
    watched_routers,
)

MARGIN = 1e-4  # between the last expert that a token takes and the next, of the logits' root mean square
ROUNDING = 2.5e-6  # how far float32 may be from float64 in one process: a quarter of what a mesh may be off
ATTEMPTS = 30
ALONE = World(0, 1, torch.device("cpu"), None, None)


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def together(seen: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """What the ranks have seen, which hold different parts of the model; and where two that hold the same differ."""
    every: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, seen)
    merged: dict[str, Tensor] = {}
    wrong = []
    for rank, one in enumerate(every):
        for name, tensor in one.items():
            if not torch.equal(merged.setdefault(name, tensor), tensor):
                wrong.append(f"{name} is another on rank {rank}")
    return merged, wrong


def reference(case: Case, mesh: Mesh, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same steps in one process."""
    config = config_of(case, mesh)
    same = {"global_batch": config.train.global_batch, "tokens": config.train.tokens}
    alone = config_of(case, Mesh(), config.model.layers, **same)
    stirred_parts(case.seed)
    with default_dtype(dtype):
        return train(alone, build_engine(alone, ALONE, end_of_text=0), whole)


def decided(case: Case, mesh: Mesh) -> tuple[Case, dict[torch.dtype, dict[str, Tensor]]]:
    """The case with the next seed at which nothing hangs on rounding, and its references.

    A token that stands between two experts goes to one or the other by rounding, and then so do the gradients. Where
    streams are nearly equal, the gradients of their gates are small differences of large terms.
    """
    for attempt in range(ATTEMPTS):
        drawn = case._replace(seed=case.seed + NEXT_SEED * attempt)
        with watched_routers(ACTIVE) as gaps:
            exact = reference(drawn, mesh, torch.float64)
        if min(gaps, default=MARGIN) < MARGIN:
            continue
        rounded = reference(drawn, mesh, torch.float32)
        if not differences(rounded, exact, ROUNDING):
            return drawn, {torch.float64: exact, torch.float32: rounded}
    raise AssertionError(f"of {ATTEMPTS} seeds none has margins of {MARGIN} and rounding below {ROUNDING}")


def run(case: Case, mesh: Mesh, world: World) -> list[str]:
    """Three steps on the mesh, in float32 and for one seed also in float64, and the same in one process."""
    dtypes = [torch.float32] if case.seed in SEEDS[1:] else [torch.float64, torch.float32]
    case, wanted = world.gather_or_raise(lambda: decided(case, mesh) if world.is_main else (case, {}))[0]
    wrong: list[str] = []
    for dtype in dtypes:
        stirred_parts(case.seed)
        with default_dtype(dtype):
            config = config_of(case, mesh)
            seen, other = together(train(config, build_engine(config, world, end_of_text=0), whole))
        if world.is_main:
            wrong += other + differences(seen, wanted[dtype])
    return wrong


def main(name: str, folder: Path, every: str = "every") -> None:
    results: dict[str, list[str]] = {}
    build.make_groups = functools.cache(make_groups)  # type: ignore[attr-defined]
    with join_world("cpu") as world:
        for case in cases(MESHES[name], bool(every)):
            begun = time.monotonic()
            try:
                results[case.name] = run(case, MESHES[name], world)
            except Exception:
                results[case.name] = [traceback.format_exc()]
            if world.is_main:
                (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
                if os.environ.get("SHOW"):
                    print(case.name, f"{time.monotonic() - begun:.1f}s", results[case.name][:4], flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)

    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])

"""One of four processes that move a run between meshes: started by torchrun from test_mesh_training.py.

Each mesh trains two steps and saves; then each takes up every other's checkpoint, and that of one process, for a third.
FOLDER/results.json has what went wrong of each pair; FOLDER/MESH/checkpoints is left for one process to take up.
"""

import functools
import json
import sys
import traceback
from pathlib import Path

import torch

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh, make_groups
from dualres.train.checkpoint import Checkpoints
from dualres.train.engines import build
from dualres.train.engines.base import Engine
from dualres.train.engines.build import build_engine
from dualres.train.process_group import World, join_world
from tests.parallel.cases import ACTIVE, MESHES, Case, config_of, share, stirred_parts, watched_routers
from tests.parallel.mesh_worker import ALONE, MARGIN

CASE = Case("dar-block", "moe", 7, (("tied_embeddings", False),))  # every token has its experts by a margin
SAVED = 2  # steps
STATE = {"best_step": SAVED}
SAME = {"layers": 7, "global_batch": 8, "tokens": 8 * 8 * 3}  # four micro-batches, whatever the mesh


def folder_of(folder: Path, name: str) -> Path:
    return folder / name.replace("/", "-")


def step(config: Config, engine: Engine, number: int) -> list[float]:
    """Loss, router's loss and norm of a step, and the loss of a batch after it."""
    losses = engine.accumulate(share(config, engine, number))
    norm = engine.update(2e-3, config.train.clip)
    after = engine.evaluate(share(config, engine, 0)[0].sequences)
    counted = after * engine.data_size if engine.data_rank == 0 else 0.0  # the ranks' batches are others
    found = engine.sum_over_ranks([losses.language, losses.router, counted])
    return [*(value / engine.world.size for value in found), norm]


def begin(name: str, mesh: Mesh, folder: Path, world: World) -> None:
    """Two steps, and a checkpoint."""
    config = config_of(CASE, mesh, **SAME)
    engine = build_engine(config, world, end_of_text=0)
    for number in range(SAVED):
        step(config, engine, number)
    checkpoints = Checkpoints(folder_of(folder, name), world, keep=1, say=print)
    checkpoints.save(SAVED, engine.tensors(), STATE)
    checkpoints.wait()
    assert checkpoints.failure is None, checkpoints.failure


def go_on(source: str, config: Config, engine: Engine, folder: Path, wanted: list[float]) -> list[str]:
    """The third step from the source's checkpoint."""
    tensors = engine.tensors()
    checkpoints = Checkpoints(folder_of(folder, source), engine.world, keep=1, say=print)
    assert checkpoints.restore(tensors) == STATE
    engine.load_tensors(tensors)
    found = step(config, engine, SAVED)
    off = max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))
    return [] if off < 1e-5 else [f"{found}, and in one process {wanted}"]


def alone(folder: Path) -> list[float]:
    """The third step of one process; its checkpoint is left with the others."""
    begin("alone", Mesh(), folder, ALONE)
    config = config_of(CASE, Mesh(), **SAME)
    engine = build_engine(config, ALONE, end_of_text=0)
    with watched_routers(ACTIVE) as gaps:
        for number in range(SAVED):
            step(config, engine, number)
        last = step(config, engine, SAVED)
    assert min(gaps) >= MARGIN
    return last


def main(folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    build.make_groups = functools.cache(make_groups)  # type: ignore[attr-defined]
    stirred_parts(CASE.seed)
    results: dict[str, list[str]] = {}
    with join_world("cpu") as world:
        wanted = world.gather_or_raise(lambda: alone(folder) if world.is_main else [])[0]
        for name in names:
            begin(name, MESHES[name], folder, world)
        for name in names:
            config = config_of(CASE, MESHES[name], **SAME)
            engine = build_engine(config, world, end_of_text=0)
            for source in (*names, "alone"):
                try:
                    results[f"{source} to {name}"] = go_on(source, config, engine, folder, wanted)
                except Exception:
                    results[f"{source} to {name}"] = [traceback.format_exc()]
        if world.is_main:
            (folder / "wanted.json").write_text(json.dumps(wanted), encoding="utf-8")
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

"""One of four processes that look at single properties of a mesh: started by torchrun from test_mesh_training.py.

FOLDER/results.json has what went wrong in each check.
"""

import contextlib
import functools
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from dualres.config.schema import Config
from dualres.model.block import compile_blocks
from dualres.parallel import pipeline
from dualres.parallel.mesh import Mesh, chunk_sizes, make_groups
from dualres.parallel.pipeline import Stage, boundaries, padded_micro_batches
from dualres.train.engines import build, fsdp
from dualres.train.engines.build import build_engine
from dualres.train.engines.fsdp import PipelineEngine
from dualres.train.process_group import World, join_world
from tests.parallel.cases import CONTEXT, MICRO, Case, config_of, differences, share, stirred_parts, train
from tests.parallel.mesh_worker import ALONE, together, whole

STREAMS = {"standard": 1, "attnres-block": 1, "dar-block": 2, "mhc": 4}
FLOAT32 = 4


def step(config: Config, world: World, resend: bool = False) -> tuple[float, dict[str, int]]:
    """The loss of a step in a pipeline, and the bytes that all ranks have sent."""
    with mock.patch.object(pipeline, "boundaries", functools.partial(boundaries, resend=resend)):
        engine = build_engine(config, world, end_of_text=0)
    assert isinstance(engine, PipelineEngine)
    with counted("get_fwd_send_ops") as states, counted("get_bwd_send_ops") as gradients:
        losses = engine.accumulate(share(config, engine, 0))
    loss, *sent = engine.sum_over_ranks([losses.language, float(sum(states)), float(sum(gradients))])
    return loss, dict(zip(("states", "gradients"), map(round, sent), strict=True))


@contextlib.contextmanager
def counted(name: str) -> Iterator[list[int]]:
    """The bytes of every tensor that stages send by this method."""
    sizes: list[int] = []
    method = getattr(Stage, name)

    def counting(stage: Stage, number: int) -> list[dist.P2POp]:
        ops = method(stage, number)
        sizes.extend(op.tensor.nbytes for op in ops)
        return ops

    with mock.patch.object(Stage, name, counting):
        yield sizes


def wanted_bytes(config: Config, mesh: Mesh, resend: bool) -> int:
    """By the formula where chunks are even, and everywhere by the sets of states that cross."""
    sizes, p, v = chunk_sizes(config, mesh), mesh.pipeline, mesh.virtual
    method = config.residual.method
    history = method not in ("standard", "mhc")
    between = boundaries(sizes, p, keeps_history=history, resend=resend)
    states = sum(s > 0 for b in between for s in b.sent)
    if history and len(set(sizes)) == 1:
        c = p * v
        units = c * (c - 1) // 2 if resend else p * (p - 1) // 2 + (v - 1) * p * (p - 1)
        assert states == sizes[0] * units
    embeddings = sum(s == 0 for b in between for s in b.sent)
    assert embeddings == ((len(sizes) if resend else p) - 1 if history else 0)
    plane = MICRO * CONTEXT // mesh.tensor * config.model.width * FLOAT32
    each = -(-config.train.global_batch // MICRO // mesh.data)
    batches = padded_micro_batches(each, p, v) * mesh.data * mesh.tensor
    return (states * STREAMS[method] + embeddings) * plane * batches


def bytes_sent(residual: str, mesh: Mesh, world: World) -> list[str]:
    """States and gradients, cached and resent; and the loss is the same."""
    stirred_parts(1)
    config = config_of(Case(residual, "dense", 1), mesh)
    found = {resend: step(config, world, resend) for resend in (False, True)}
    wrong = [] if abs(found[False][0] - found[True][0]) < 1e-6 else [f"the losses are {found}"]
    for resend, (_, sent) in found.items():
        wanted = wanted_bytes(config, mesh, resend)
        if sent != {"states": wanted, "gradients": wanted}:
            wrong.append(f"resend={resend}: sent {sent}, wanted {wanted}")
    return wrong


def without_the_sum(world: World) -> list[str]:
    """Where the gradients of whole weights are not summed over the tensor group, they are wrong, and only they."""
    mesh = Mesh(data=2, tensor=2)
    stirred_parts(1)
    config = config_of(Case("dar-block", "dense", 1), mesh)

    def nothing(tensors: list[Tensor], group: object) -> None:
        """What must be noticed."""

    kept, fsdp.all_reduce_together = fsdp.all_reduce_together, nothing  # type: ignore[assignment]
    try:
        engine = build_engine(config, world, end_of_text=0)
        engine.accumulate(share(config, engine, 0))
        found = {name: whole(p.grad) for name, p in engine.parameters.items()}  # type: ignore[attr-defined]
    finally:
        fsdp.all_reduce_together = kept
    if not world.is_main:
        return []
    same = {"global_batch": config.train.global_batch, "tokens": config.train.tokens}
    alone = config_of(Case("dar-block", "dense", 1), Mesh(), config.model.layers, **same)
    engine = build_engine(alone, ALONE, end_of_text=0)
    engine.accumulate(share(alone, engine, 0))
    wanted = {name: p.grad for name, p in engine.parameters.items()}  # type: ignore[attr-defined]
    off = {message.split(" is off")[0] for message in differences(found, wanted)}
    parts = {name.rpartition(".")[0] for name in wanted}
    expected = {part for part in parts if "norm" in part or "pathway" in part or "readout" in part}
    return [] if off == expected else [f"wrong are {off ^ expected}, or should be"]


def recomputed_in_bf16(mesh: Mesh, world: World) -> list[str]:
    """bfloat16 with recomputation is near float32, and all ranks of a step agree on the loss."""
    stirred_parts(1)
    case, found = Case("dar-block", "moe", 1), {}
    for precision, recompute in (("fp32", "none"), ("bf16", "full")):
        config = config_of(case, mesh, precision=precision, recompute=recompute)
        seen, wrong = together(train(config, build_engine(config, world, end_of_text=0), whole))
        if wrong:
            return wrong
        found[precision] = seen
    off = max(abs(found["bf16"][f"{s} loss"] / found["fp32"][f"{s} loss"] - 1).item() for s in range(3))
    return [] if 0 < off < 0.01 else [f"the loss of bfloat16 is off by {off}"]


def compiled(mesh: Mesh, world: World) -> list[str]:
    """Blocks that are compiled, with PyTorch's own operators below, train alike."""
    stirred_parts(1)
    case, found = Case("dar-block", "moe", 1), {}
    build.compile_blocks = functools.partial(compile_blocks, backend="aot_eager")  # type: ignore[attr-defined]
    for mode in ("off", "default"):
        config = config_of(case, mesh, compile=mode)
        found[mode], wrong = together(train(config, build_engine(config, world, end_of_text=0), whole))
        if wrong:
            return wrong
    return differences(found["default"], found["off"])


def fewer_rows(mesh: Mesh, world: World) -> list[str]:
    """The loss of one sequence, where training has two at a time."""
    stirred_parts(1)
    case = Case("dar-block", "moe", 1)
    sequences = share(config_of(case, mesh), build_engine(config_of(case, Mesh()), ALONE, 0), 0)[0].sequences[:1]
    engine = build_engine(config_of(case, mesh), world, end_of_text=0)
    found = engine.sum_over_ranks([engine.evaluate(sequences)])[0] / world.size
    alone = build_engine(config_of(case, Mesh(), layers=len(engine.decoder.stack.blocks) * 2 - 1), ALONE, 0)
    wanted = alone.evaluate(sequences)
    return [] if abs(found - wanted) < 1e-5 else [f"{found}, and in one process {wanted}"]


CHECKS: dict[str, Callable[[World], list[str]]] = {
    "without the sum over tensor ranks": without_the_sum,
    **{
        f"bytes of {residual} on {mesh.describe()}": functools.partial(bytes_sent, residual, mesh)
        for residual in STREAMS
        for mesh in (Mesh(pipeline=4), Mesh(data=2, pipeline=2, virtual=2), Mesh(tensor=2, pipeline=2))
    },
    **{
        f"fewer rows on {mesh.describe()}": functools.partial(fewer_rows, mesh)
        for mesh in (
            Mesh(pipeline=4),
            Mesh(data=2, pipeline=2),
            Mesh(tensor=2, pipeline=2),
            Mesh(data=2, tensor=2, expert=2),
        )
    },
    **{
        f"compiled on {mesh.describe()}": functools.partial(compiled, mesh)
        for mesh in (Mesh(data=2, tensor=2, expert=2), Mesh(data=2, pipeline=2))
    },
    **{
        f"bfloat16 on {mesh.describe()}": functools.partial(recomputed_in_bf16, mesh)
        for mesh in (Mesh(data=2, tensor=2, expert=2), Mesh(tensor=2, pipeline=2))
    },
}


SOME = (
    "without the sum over tensor ranks",
    "bytes of dar-block on pp4",
    "bytes of dar-block on dp2·pp2×2",
    "bytes of dar-block on tp2·pp2",
    "bytes of mhc on dp2·pp2×2",
    "fewer rows on pp4",
    "fewer rows on tp2·pp2",
    "compiled on dp2·tp2/ep2",
    "bfloat16 on tp2·pp2",
)


def main(folder: Path, *names: str) -> None:
    torch.set_num_threads(1)
    build.make_groups = functools.cache(make_groups)  # type: ignore[attr-defined]
    results = {}
    with join_world("cpu") as world:
        for name in names:
            try:
                results[name] = CHECKS[name](world)
            except Exception:
                results[name] = [traceback.format_exc()]
            if world.is_main:
                (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

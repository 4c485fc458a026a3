"""What a plan counts of a rank's memory is what a run holds: against autograd, the allocator and the engines."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from dualres.config.schema import Config
from dualres.model.accounting import parameters
from dualres.model.block import recompute_blocks
from dualres.model.decoder import build_decoder
from dualres.model.loss import Objective
from dualres.ops import dispatch
from dualres.parallel.mesh import Mesh, mesh_of
from dualres.plan.activations import CASTING, Memory, Passes, count_passes
from dualres.plan.estimate import estimate
from dualres.plan.hardware import Hardware
from dualres.plan.local_model import Share
from dualres.plan.stages import pipeline_ranks
from dualres.train.process_group import World
from tests.plan.engine_memory import sequences, step_memory
from tests.train.tiny import ALONE, tiny_config


class Handle:
    """What autograd holds instead of a tensor; it dies with the node that holds it."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor.detach()  # which does not hold the node


class Allocated(NamedTuple):
    """Bytes of PyTorch's allocator in a piece of work, by its profiler."""

    left: int
    most: int


def allocated(work: Callable[[], Any]) -> Allocated:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = work()
    assert profiled.profiler is not None
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del result  # what the work returned was still there
    return Allocated(now, most)


def real_objective(config: Config, engine: str) -> Objective:
    decoder = build_decoder(config.model, config.residual)
    if config.train.precision == "bf16" and engine in CASTING:
        decoder.to(torch.bfloat16)
    recompute_blocks(decoder.stack, config.train.recompute)
    return Objective(decoder, config.train.loss_rows)


def autocast(config: Config, engine: str) -> contextlib.AbstractContextManager[Any]:
    casts = config.train.precision == "bf16" and engine not in CASTING
    return torch.autocast("cpu", torch.bfloat16) if casts else contextlib.nullcontext()


KEPT = [
    ("standard", "dense", "fp32", "single"),
    ("mhc-2", "moe", "fp32", "fsdp2"),
    ("attnres-full", "dense", "bf16", "fsdp2"),
    ("dar-block", "dense", "bf16", "single"),
    ("dar-block", "moe", "bf16", "fsdp2"),
]


def kept_bytes(config: Config, passes: Passes) -> int:
    """Of the whole model for one micro-batch, without the loss."""
    (rank,) = pipeline_ranks(config, "single", Mesh(), passes)
    return rank.chunks[0].kept.kept


@pytest.mark.parametrize(("residual", "feedforward", "precision", "engine"), KEPT)
def test_counted_activations_are_what_autograd_keeps(residual: str, feedforward: str, precision: str, engine: str):
    """To the byte, on a real model. The handles of nodes that nothing uses are gone: they are not counted either."""
    config = tiny_config(residual, feedforward, train__precision=precision)
    decoder = real_objective(config, engine).decoder
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    handles: weakref.WeakSet[Handle] = weakref.WeakSet()

    def pack(tensor: Tensor) -> Handle:
        handle = Handle(tensor)
        handles.add(handle)
        return handle

    with saved_tensors_hooks(pack, lambda handle: handle.tensor), autocast(config, engine):
        hidden = decoder.hidden(sequences(config)[:, :-1])
    storages = {handle.tensor.untyped_storage().data_ptr(): handle.tensor.untyped_storage() for handle in handles}
    kept = sum(storage.nbytes() for address, storage in storages.items() if address not in own)
    assert hidden.requires_grad
    assert kept_bytes(config, count_passes(config, Share(), engine)) == kept


SCALARS = 8 * 64  # bytes of numbers that PyTorch turns into tensors below the reach of Python


@pytest.mark.parametrize(
    ("residual", "feedforward", "recompute"),
    [
        ("dar-block", "dense", "none"),
        ("dar-block", "moe", "selective"),
        ("dar-block", "dense", "full"),
        ("standard", "dense", "selective"),
        ("standard", "moe", "full"),
    ],
)
def test_counted_bytes_are_what_the_allocator_gave(residual: str, feedforward: str, recompute: str):
    """After a forward pass with its loss, also where blocks are recomputed: checkpoints hide tensors from hooks."""
    config = tiny_config(residual, feedforward, train__recompute=recompute, train__precision="bf16")
    objective, batch = real_objective(config, "single"), sequences(config)

    def forward() -> Tensor:
        with autocast(config, "single"):
            return objective(batch.clone())

    counted = count_passes(config, Share(), "single")
    blocks = 0 if recompute == "none" else len(counted.blocks)
    generators = blocks * torch.get_rng_state().nbytes  # a recomputed block keeps the random state
    assert 0 <= allocated(forward).left - (kept_bytes(config, counted) + counted.end.loss + generators) < SCALARS


def planned(config: Config, engine: str, ranks: int) -> Memory:
    return estimate(config, engine, Mesh(data=ranks), Hardware()).memory[0]


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[World]:
    """The first of so many ranks whose others do not exist: it talks to no one, and holds what it would hold."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield World(0, request.param, torch.device("cpu"), None, None)
    dist.destroy_process_group()


PEAKS = [
    ("dar-block", "dense", "none", "bf16"),
    ("dar-block", "moe", "full", "fp32"),
    ("standard", "moe", "selective", "fp32"),
    ("mhc-2", "dense", "full", "bf16"),
]


def deeper(residual: str, feedforward: str, recompute: str, precision: str, **changes: Any) -> Config:
    how = {"train__recompute": recompute, "train__precision": precision}
    return tiny_config(residual, feedforward, model__layers=4, **how, **changes)


@pytest.mark.parametrize("case", PEAKS, ids="-".join)
def test_memory_of_one_process(case: tuple[str, str, str, str]):
    """State to the byte. The peak nearly: not all that is kept is there at once."""
    config = deeper(*case)
    held, most = step_memory(config, ALONE)
    found = planned(config, "single", 1)
    assert {name: getattr(found, name) for name in held} == held
    assert 0.99 * most < found.total - sum(held.values()) < 1.15 * most


WIDE: dict[str, Any] = {  # mostly weights, as a large model on many GPUs
    "model__width": 192,
    "model__ffn_width": 768,
    "model__layers": 6,  # three blocks: one in use, one on its way in, one on its way out
    "model__context": 8,
    "train__micro_batch": 1,
    "train__tokens": 10**5,
}
SHARDED = {  # ranks (three divide almost none of its tensors), and how far the estimate may lie above the measured peak
    "many tokens": (2, deeper(*PEAKS[0], train__micro_batch=8, train__global_batch=8), 1.1),
    "many tokens, recomputed": (3, deeper(*PEAKS[1]), 1.15),
    "many weights": pytest.param(3, tiny_config(train__precision="bf16", **WIDE), 1.1, marks=pytest.mark.slow),
    "many weights, recomputed": (2, tiny_config(train__recompute="full", **WIDE), 1.02),
}


@pytest.mark.parametrize(("ranks", "config", "above"), SHARDED.values(), ids=SHARDED, indirect=["ranks"])
def test_memory_of_a_rank_of_fsdp2(ranks: World, config: Config, above: float):
    held, most = step_memory(config, ranks)
    found = planned(config, "fsdp2", ranks.size)
    assert {name: getattr(found, name) for name in held} == held
    assert 0.99 * most < found.total - sum(held.values()) < above * most
    whole = planned(config, "single", 1).weights
    tensors = list(build_decoder(config.model, config.residual, device="meta").parameters())
    padding = sum((ranks.size - 1) * 4 * tensor[0].numel() for tensor in tensors)
    assert whole <= ranks.size * found.weights <= whole + padding


@pytest.mark.parametrize("ranks", [2], indirect=True)
def test_memory_of_a_rank_of_a_tensor_group(ranks: World):
    """FSDP2 gathers the weights of a single data-parallel rank too, but sums no gradients: the plan counts both."""
    group: dict[str, Any] = {"train__parallel__tensor": 2, "train__parallel__sequence_parallel": "true"}
    config = tiny_config(train__precision="bf16", train__engine="fsdp2", model__kv_heads=2, **WIDE, **group)
    held, most = step_memory(config, ranks)
    found = estimate(config, "fsdp2", mesh_of(config, ranks.size), Hardware()).memory[0]
    assert {name: getattr(found, name) for name in held} == held
    assert 0.99 * most < found.total - sum(held.values()) < 1.25 * most


STATE = Memory._fields[: Memory._fields.index("activations")]  # and what engines add to it


@pytest.mark.parametrize(
    ("engine", "stage", "bytes_per_parameter"),
    [
        ("ddp", 0, 4 + 4 + 8 + 4),  # the last are its buckets
        ("deepspeed", 1, 2 + 2 * 2 + 12 / 8),
        ("deepspeed", 2, 2 + 2 / 8 + 12 / 8),
        ("deepspeed", 3, (2 + 2 + 12) / 8 + 2),  # the last are gathered weights: all of a small model
    ],
)
def test_state_of_other_engines(engine: str, stage: int, bytes_per_parameter: float):
    config = tiny_config(train__precision="bf16", train__parallel__zero_stage=stage)
    count = parameters(build_decoder(config.model, config.residual, device="meta")).total
    held = planned(config, engine, 8)
    buckets = 2 * 500_000_000 if engine == "deepspeed" else 0
    state = sum(held[: len(STATE)])
    assert state - buckets == pytest.approx(bytes_per_parameter * count, rel=2e-3)
    assert held.reduced_gradients == (buckets or held.gradients)
    like = planned(config, "fsdp2" if engine == "deepspeed" else "single", 1)  # the same casts
    assert held[len(STATE) :] == like[len(STATE) :]


@pytest.mark.parametrize("forced", ["reference", "triton"])
def test_a_plan_does_not_depend_on_where_it_is_made(forced: Any, monkeypatch: pytest.MonkeyPatch):
    """The operators of the machine that plans are not those of the machine that trains."""
    config = tiny_config(residual="dar-block")
    wanted = count_passes(config, Share(), "single")
    count_passes.cache_clear()
    monkeypatch.setattr(dispatch, "FORCED", forced)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert count_passes(config, Share(), "single") == wanted

"""Models, batches and meshes that all parallel tests share; the reference is one process with the same batches."""
# B batch  T tokens

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualres.config.schema import Config, ModelConfig, MoEConfig, ParallelConfig, ResidualConfig, TrainConfig
from dualres.model import decoder, moe
from dualres.model.decoder import part_generator, reset_part
from dualres.model.moe import MoE
from dualres.parallel.mesh import Mesh
from dualres.train.engines import build
from dualres.train.engines.base import Engine, MicroBatch
from dualres.train.optimizer import learning_rate
from tests.small import relative_error

STEPS, SEEDS, NEXT_SEED = 3, (1, 2, 3), 10  # the next is tried where one does not do
CONTEXT, MICRO = 8, 2
ACTIVE = 2  # experts of a token
NOISE = 0.1
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative root mean square
ZEROS = {torch.float64: 1e-13, torch.float32: 1e-8}  # what cancels: a rounding of the terms, and no gradient
# Micro-batches of a step, which no mesh divides: data-parallel ranks or the schedule have to fill up.
COUNTS = {
    "dp4": 5,
    "dp4/ep2": 5,
    "dp4/ep4": 5,
    "dp2·tp2": 3,
    "dp2·tp2/ep2": 3,
    "dp2·pp2": 5,
    "tp2·pp2": 1,
    "pp4": 3,
    "dp2·pp2×2": 3,
}
MESHES = {
    mesh.describe(): mesh
    for mesh in (
        Mesh(data=4),
        Mesh(data=4, expert=2),
        Mesh(data=4, expert=4),
        Mesh(data=2, tensor=2),
        Mesh(data=2, tensor=2, expert=2),
        Mesh(data=2, pipeline=2),
        Mesh(tensor=2, pipeline=2),
        Mesh(pipeline=4),
        Mesh(data=2, pipeline=2, virtual=2),
    )
}
RESIDUALS = {  # three or seven layers in blocks of two: two or four blocks, the last a short one
    "standard": ResidualConfig("standard"),
    "attnres-block": ResidualConfig("attnres-block", branches_per_block=4),
    "dar-block": ResidualConfig("dar-block", branches_per_block=4, gate_scale=1.0),
    "mhc": ResidualConfig("mhc", streams=4),
}


class Case(NamedTuple):
    """One training of three steps."""

    residual: str
    feedforward: str
    seed: int
    changes: tuple[tuple[str, Any], ...] = ()  # of the model

    @property
    def name(self) -> str:
        return "-".join([self.residual, self.feedforward, str(self.seed), *(f"{k}={v}" for k, v in self.changes)])


# Every dimension, and every two that share a parameter or a message: data with expert (and ranks that hold the same
# experts), tensor with data and expert, tensor with pipeline, pipeline with data and several chunks on a rank.
REPRESENTATIVE = ("dp4/ep2", "dp2·tp2/ep2", "tp2·pp2", "dp2·pp2×2")


def cases(mesh: Mesh, every: bool = True) -> list[Case]:
    """Dense (without expert ranks) and sparse, and other vocabularies; with all methods and seeds, or some."""
    kinds = ["moe"] if mesh.expert > 1 else ["dense", "moe"]
    kind = kinds[0]
    if every:
        plain = [Case(r, kind, seed) for r in RESIDUALS for kind in kinds for seed in SEEDS]
    else:  # a history of two streams, and one state of four streams
        plain = [Case("dar-block", "moe", SEEDS[0]), Case("mhc", kind, SEEDS[1])]
    return [
        *plain,
        Case("dar-block", kind, 4, (("tied_embeddings", False),)),
        Case("dar-block", kind, 5, (("tied_embeddings", False), ("embedding_width", 8))),
        Case("attnres-block", kind, 6, (("embedding_width", 8), ("query_key_norm", True), ("attention_bias", "all"))),
    ]


def config_of(case: Case, mesh: Mesh, layers: int | None = None, **train: Any) -> Config:
    """The config that makes this mesh of as many processes; without `layers`, as few as it can be cut into."""
    sparse = MoEConfig(experts=8, active=ACTIVE, expert_width=16) if case.feedforward == "moe" else None
    given: dict[str, Any] = {
        "layers": layers or (3 if mesh.pipeline * mesh.virtual <= 2 else 7),
        "width": 16,
        "heads": 4,
        "kv_heads": 2,
        "ffn_width": None if sparse else 24,
        "moe": sparse,
        "vocab_size": 37,  # odd: ranges of unequal size
        "context": CONTEXT,
        **dict(case.changes),
    }
    parallel = ParallelConfig(mesh.tensor, mesh.pipeline, mesh.virtual, mesh.expert, sequence_parallel=mesh.tensor > 1)
    count = COUNTS.get(mesh.describe(), 4)
    if mesh.virtual > 1 and case.seed % NEXT_SEED == SEEDS[0]:
        count = 9  # five for each rank, which are no whole rounds
    recipe = TrainConfig(
        dataset="none",
        tokens=STEPS * CONTEXT * MICRO * count,
        micro_batch=MICRO,
        global_batch=MICRO * count,
        learning_rate=2e-3,
        min_learning_rate=2e-4,
        warmup_steps=1,
        adam_eps=1e-4,  # AdamW divides by the gradient's size: where that is rounding only, so would the step be
        precision="fp32",
        loss_rows=5,
        seed=case.seed,
        engine="fsdp2" if mesh.processes > 1 else "single",
        parallel=parallel,
    )
    return Config(ModelConfig(**given), RESIDUALS[case.residual], dataclasses.replace(recipe, **train))


def micro_batches(config: Config, step: int) -> list[Tensor]:
    """Of one step, all of them."""
    generator = torch.Generator().manual_seed(1000 * config.train.seed + step)
    count = config.train.global_batch // config.train.micro_batch
    shape = count, config.train.micro_batch, config.model.context + 1
    return list(torch.randint(config.model.vocab_size, shape, generator=generator))


def share(config: Config, engine: Engine, step: int) -> list[MicroBatch]:
    """The engine's of them, as the loop deals them out."""
    every, ranks = micro_batches(config, step), engine.data_size
    rounds = -(-len(every) // ranks)
    mine = [every[n] if n < len(every) else None for n in range(engine.data_rank, rounds * ranks, ranks)]
    return [MicroBatch(every[0], 0.0) if one is None else MicroBatch(one, ranks / len(every)) for one in mine]


def stirred_parts(seed: int) -> None:
    """From now on, what is drawn has no parameter that is zero or one: queries and gates are not at their start.

    Routers are pulled to some experts, so that the others have few tokens, and one of them none. Numbers are drawn in
    float32, so that a model has the same in float64.
    """

    def reset(part: nn.Module, name: str, std: float, _: int) -> None:
        drawn = copy.deepcopy(part).float()
        reset_part(drawn, name, std, seed)
        generator = part_generator(drawn, f"noise {name}", seed)
        with torch.no_grad():
            for parameter in drawn.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                parameter.add_(noise, alpha=NOISE)
            for module in drawn.modules():
                if isinstance(module, MoE):
                    module.router.weight[:3].mul_(4)
                    module.router.weight[-1].copy_(module.router.weight[0] / 2)  # never above the first, nor its like
            for mine, theirs in zip(part.parameters(), drawn.parameters(), strict=True):
                mine.copy_(theirs)

    build.reset_part = decoder.reset_part = reset  # type: ignore[assignment, attr-defined]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What is built meanwhile has this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def watched_routers(active: int) -> Iterator[list[float]]:
    """How near to each other the last expert that is taken and the first that is not were, per call, relative."""
    gaps: list[float] = []
    routed = moe.router_logits

    def watched(tokens: Tensor, weight: Tensor) -> Tensor:
        logits = routed(tokens, weight)
        best = logits.detach().topk(active + 1, -1).values
        gaps.append(float(((best[:, -2] - best[:, -1]) / logits.detach().square().mean(-1).sqrt()).min()))
        return logits

    moe.router_logits = watched
    try:
        yield gaps
    finally:
        moe.router_logits = routed


def train(config: Config, engine: Engine, whole) -> dict[str, Tensor]:
    """Losses and gradients of every step, and the weights at the end. `whole`: how a tensor is gathered."""
    seen: dict[str, Tensor] = {}
    for step in range(STEPS):
        losses = engine.accumulate(share(config, engine, step))
        language, router = engine.sum_over_ranks([losses.language, losses.router])
        seen[f"{step} loss"] = torch.tensor(language / engine.world.size)
        seen[f"{step} router"] = torch.tensor(router / engine.world.size)
        for name, parameter in engine.parameters.items():  # type: ignore[attr-defined]
            assert parameter.grad is not None, f"{name} has no gradient"
            seen[f"{step} gradient of {name}"] = whole(parameter.grad)
        norm = engine.update(learning_rate(step, STEPS, config.train), config.train.clip)
        seen[f"{step} norm"] = torch.tensor(norm)
    for name, parameter in engine.parameters.items():  # type: ignore[attr-defined]
        seen[f"weights {name}"] = whole(parameter.detach())
    return seen


def by_module(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of a module in one tensor: see tests/model/distributed_worker.py."""
    joined: dict[str, list[Tensor]] = {}
    for name, tensor in seen.items():
        joined.setdefault(name.rpartition(".")[0] or name, []).append(tensor.flatten())
    return {name: torch.cat(tensors) for name, tensors in joined.items()}


def differences(ours: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float | None = None) -> list[str]:
    """Where they are not the same: in float64 of every tensor alone, in float32 of a module's tensors together."""
    if ours.keys() != wanted.keys():
        return [f"other names: {sorted(ours.keys() ^ wanted.keys())}"]
    dtype = next(iter(ours.values())).dtype
    if dtype == torch.float32:
        ours, wanted = by_module(ours), by_module(wanted)
    off = {name: relative_error(ours[name], wanted[name]) for name in wanted}
    return [
        f"{name} is off by {error:.1e} in {dtype}"
        for name, error in off.items()
        if not error < (tolerance or TOLERANCES[dtype])
        and not (ours[name] - wanted[name]).square().mean().sqrt() < ZEROS[dtype]
    ]

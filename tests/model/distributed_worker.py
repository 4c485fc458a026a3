"""One of two processes that train every decoder on half of each batch: `python -m … RANK FOLDER GROUP`, from the root.

Rank 0 writes FOLDER/results.json after every case: what went wrong in it, or nothing. The pytest side is
test_distributed.py.
"""

import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from dualres.config.schema import MoEConfig
from dualres.model.attention import Attention, RouterReport
from dualres.model.block import NormedBranch, Recompute, recompute_blocks
from dualres.model.decoder import Decoder
from tests.small import FEEDFORWARDS, RESIDUALS, model_config, random_tokens, relative_error, stirred

RANKS, BATCH, STEPS = 2, 4, 2
HOW: tuple[Recompute, ...] = ("none", "full", "selective")
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-5}  # relative root mean square
ZERO = {torch.float64: 1e-12, torch.float32: 1e-9}  # absolute: mHC's first mixing gradient is zero but for rounding
NOISE = {torch.float64: 0.3, torch.float32: 0.1}
LAYERS = 3  # with two layers per block, the last block is a shorter one

Case = Callable[[DeviceMesh], list[str]]  # -> what went wrong


def small(residual: str, feedforward: str, noise: float = 0.3) -> Decoder:
    """Without the auxiliary loss: it is no mean over tokens, so that of a batch is not the mean of its halves'."""
    moe = MoEConfig(experts=6, active=2, expert_width=24, aux_coefficient=0.0)
    changes = {"moe": moe} if feedforward == "moe" else {}
    model = model_config(feedforward, layers=LAYERS, width=16, heads=2, kv_heads=1, **changes)
    return stirred(model, RESIDUALS[residual], noise=noise)


def batch(step: int) -> Tensor:
    return random_tokens(BATCH, 11, seed=step)


def share(tokens: Tensor) -> Tensor:
    return tokens.chunk(RANKS)[dist.get_rank()]


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def ddp(decoder: Decoder, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(decoder)


def fsdp(decoder: Decoder, mesh: DeviceMesh, **options: Any) -> nn.Module:
    for block in decoder.stack:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(decoder, mesh=mesh, **options)
    return decoder


def train(model: nn.Module, part: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Losses and gradients of every step, and the parameters at the end.

    It takes two steps: DDP notices a parameter without a gradient only in the step after.
    """
    seen: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = {name.removeprefix("module."): p for name, p in model.named_parameters()}
    for step in range(STEPS):
        tokens = part(batch(step))
        loss = loss_of(model(tokens), tokens)
        loss.backward()
        seen[f"step {step}: loss"] = loss.detach()
        for name, parameter in parameters.items():
            assert parameter.grad is not None, f"{name} has no gradient"
            seen[f"step {step}: gradient of {name}"] = whole(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    return seen | {f"{name} at the end": whole(parameter.detach()) for name, parameter in parameters.items()}


def by_module(seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """All of a module in one tensor. The gradient of a gate's scale or bias is one number, a sum over all tokens that
    may cancel to nearly nothing: alone, its float32 rounding has no bound. Float64 compares it alone."""
    joined: dict[str, list[Tensor]] = {}
    for name, tensor in seen.items():
        joined.setdefault(name.rpartition(".")[0] or name, []).append(tensor.flatten())
    return {name: torch.cat(tensors) for name, tensors in joined.items()}


def equal_to_one_process(
    engine: Callable[[Decoder, DeviceMesh], nn.Module],
    dtype: torch.dtype,
    residual: str,
    feedforward: str,
    mesh: DeviceMesh,
) -> list[str]:
    """Most in float64: where streams are still equal, the gradients of gates are small differences of large terms."""
    wanted = train(small(residual, feedforward, NOISE[dtype]).to(dtype), lambda tokens: tokens)
    ours = train(engine(small(residual, feedforward, NOISE[dtype]).to(dtype), mesh), share)
    for step in range(STEPS):
        dist.all_reduce(ours[f"step {step}: loss"])
        ours[f"step {step}: loss"] /= RANKS
    assert ours.keys() == wanted.keys()
    if dtype == torch.float32:
        ours, wanted = by_module(ours), by_module(wanted)
    return [
        f"{name} is off by {relative_error(ours[name], wanted[name]):.1e}"
        for name in wanted
        if relative_error(ours[name], wanted[name]) > TOLERANCES[dtype]
        and (ours[name] - wanted[name]).square().mean().sqrt() > ZERO[dtype]
    ]


def recomputed_dropout(residual: str, mesh: DeviceMesh) -> list[str]:
    """FSDP2 with dropout in the branches: recomputation changes no bit of the gradients."""
    found: dict[Recompute, dict[str, Tensor]] = {}
    for how in HOW:
        decoder = small(residual, "dense").double()  # by the equations
        for module in list(decoder.modules()):
            if isinstance(module, NormedBranch):
                module.module = Dropping(module.module)
        recompute_blocks(decoder.stack, how)
        torch.manual_seed(dist.get_rank())
        found[how] = train(fsdp(decoder, mesh), share)
    return [
        f"{how}: {name} differs"
        for how in HOW
        for name in found["none"]
        if not found[how][name].equal(found["none"][name])
    ]


class Dropping(nn.Module):
    """A branch that drops half of its output."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, h: Tensor, **context: Any) -> Tensor:
        return nn.functional.dropout(self.inner(h, **context))


def near_float32(residual: str, feedforward: str, mesh: DeviceMesh) -> list[str]:
    """FSDP2 that casts to bfloat16: a loss near that of float32, and branches whose context is what was given."""
    tokens = share(batch(0))
    wanted = loss_of(small(residual, feedforward)(tokens), tokens).item()
    decoder, report, tables = small(residual, feedforward), RouterReport(), set()
    for module in decoder.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(
                lambda _, __, given: tables.update({given["context"].cosine.dtype, given["context"].sine.dtype}),
                with_kwargs=True,
            )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fsdp(decoder, mesh, mp_policy=policy)
    logits = model(tokens, report=report)
    loss = loss_of(logits.float(), tokens)
    loss.backward()

    layers = set(range(LAYERS)) if feedforward == "moe" else set()
    checks = {
        f"the logits are {logits.dtype}: nothing was cast": logits.dtype == torch.bfloat16,
        f"the loss is {loss.item()}, in float32 {wanted}": abs(loss.item() - wanted) < 2e-2 * wanted,
        f"only the layers {set(report.losses)} reported": report.losses.keys() == layers,
        f"the rotary tables are {tables}": tables == {torch.float32},
    }
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        fine = grad is not None and grad.dtype == torch.float32 and bool(whole(grad).isfinite().all())
        checks[f"the gradient of {name} is {grad}"] = fine
    return [message for message, holds in checks.items() if not holds]


def equal(engine: Callable[..., nn.Module], dtype: torch.dtype, residual: str, feedforward: str) -> tuple[str, Case]:
    name = f"{residual}-{feedforward}-{engine.__name__}-{str(dtype).removeprefix('torch.')}"
    return name, partial(equal_to_one_process, engine, dtype, residual, feedforward)


KERNELS = ("standard", "attnres-block", "dar-block", "mhc-4")  # in float32: float64 takes the equations
GROUPS: dict[str, dict[str, Case]] = {
    "one of each": dict(
        [equal(ddp, torch.float64, "dar-block", "dense"), equal(fsdp, torch.float32, "dar-block", "moe")]
    ),
    "equal": dict(
        [equal(engine, torch.float64, r, f) for r in RESIDUALS for f in FEEDFORWARDS for engine in (ddp, fsdp)]
        # PyTorch's grouped product, on which experts run, does not exist in float64.
        + [equal(engine, torch.float32, r, "moe") for r in KERNELS for engine in (ddp, fsdp)]
    ),
    "dropout": {
        f"{residual}-dropout-fsdp": partial(recomputed_dropout, residual) for residual in ("standard", "dar-block")
    },
    "bfloat16": {
        f"{residual}-{feedforward}-fsdp-bfloat16": partial(near_float32, residual, feedforward)
        for residual in ("standard", "dar-block")
        for feedforward in FEEDFORWARDS
    },
}


def main(rank: int, folder: Path, group: str) -> None:
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"  # no port to choose, none to collide
    dist.init_process_group("gloo", rendezvous, timedelta(seconds=300), world_size=RANKS, rank=rank)
    mesh = init_device_mesh("cpu", (RANKS,))
    results = {}
    for name, case in GROUPS[group].items():
        try:
            results[name] = case(mesh)
        except Exception:
            results[name] = [traceback.format_exc()]
        if rank == 0:
            (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()  # without it a process may leave while the other still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])

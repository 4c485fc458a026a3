"""Compares each fused operator, forward and backward, with the equations, the paper's pseudocode and memory bandwidth.

    python benchmarks/ops.py                         # 2048 tokens, width 640, nine states, float32, one thread
    python benchmarks/ops.py --threads 2 --dtype bf16 --json

The limit is the bytes that must move (every input row read once, every output row written once) divided by the
bandwidth that adding two states of the same size into a third reaches in the same round. All implementations take turns
within a round, and a ratio compares the times of one round; the spread is from the lowest to the highest. "saved"
is what the operator saves for its backward pass besides its inputs. Freed memory stays with the process, so that no
time is spent on page faults.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualres import ops
from dualres.ops import GateParameters, Live, Norm, Prefix, dispatch, reference
from dualres.residual.route import DUAL, SINGLE
from dualres.train.process_group import keep_freed_memory
from dualres.util.amx import avoid_hidden_tiles
from dualres.util.tables import table

EPS = 1e-6
WARM_UP = 3  # rounds in which kernels compile and the heap reaches its size
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Case(NamedTuple):
    """One operator with its inputs: fused, as equations, and as in the paper if the paper has it."""

    inputs: list[Tensor]
    fused: Callable[..., Sequence[Tensor]]
    equations: Callable[..., Sequence[Tensor]]
    pseudocode: Callable[..., Sequence[Tensor]] | None


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--states", type=int, default=9, help="states of the history")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ops", default=",".join(CASES), help="separated by commas")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    avoid_hidden_tiles()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {}
    for name in arguments.ops.split(","):
        torch.manual_seed(0)
        case = CASES[name](arguments.tokens, arguments.width, arguments.states, DTYPES[arguments.dtype], device)
        found[name] = measure(case, arguments.rounds)
        print(f"{name} measured", file=sys.stderr, flush=True)
    setting = {
        "tokens": arguments.tokens,
        "width": arguments.width,
        "states": arguments.states,
        "dtype": arguments.dtype,
        "device": device if device == "cuda" else f"{torch.get_num_threads()} threads",
        "operators": dispatch.FORCED or dispatch.BY_DEVICE[device],
        "rounds": arguments.rounds,
        "load": os.getloadavg()[0],
    }
    if arguments.json:
        print(json.dumps(setting | {"found": found}))
        return
    print(", ".join(f"{key} {value}" for key, value in setting.items()))
    print(as_table(found))


def retrieval_of_the_paper(history: Sequence[Tensor], queries: Tensor) -> list[Tensor]:
    """The pseudocode of DAR: keys normalized, stacked and scored, values stacked and weighted, one query at a time."""
    found = []
    for query in queries:
        for j in range(2):
            keys = torch.stack([normalized(state[1 - j]) for state in history])  # (R,B,T,D)
            values = torch.stack([state[j] for state in history])
            weights = torch.einsum("d,rbtd->rbt", query[j], keys).softmax(0)
            found.append(torch.einsum("rbt,rbtd->btd", weights, values))
    return found


def normalized(x: Tensor) -> Tensor:
    """A weightless RMSNorm, as it is usually written."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def prefix_case(tokens: int, width: int, states: int, dtype: torch.dtype, device: str) -> Case:
    """Phase 1 of DAR: two query sets, two streams."""
    history = [torch.randn(2, 1, tokens, width, device=device).to(dtype) for _ in range(states)]
    queries = 0.05 * torch.randn(2, 2, width, device=device)

    def call(prefix: Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
        return lambda queries, *history: [found.retrieved for found in prefix(history, queries, route=DUAL, eps=EPS)]

    def paper(queries: Tensor, *history: Tensor) -> list[Tensor]:
        return retrieval_of_the_paper(history, queries.to(history[0].dtype))

    return Case([queries, *history], call(ops.prefix), call(reference.prefix), paper)


def attnres_prefix_case(tokens: int, width: int, states: int, dtype: torch.dtype, device: str) -> Case:
    """Phase 1 of AttnRes: two query sets, one stream."""
    history = [torch.randn(1, 1, tokens, width, device=device).to(dtype) for _ in range(states)]
    queries = 0.05 * torch.randn(2, 1, width, device=device)

    def call(prefix: Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
        return lambda queries, *history: [found.retrieved for found in prefix(history, queries, route=SINGLE, eps=EPS)]

    return Case([queries, *history], call(ops.prefix), call(reference.prefix), None)


def read_case(tokens: int, width: int, states: int, dtype: torch.dtype, device: str) -> Case:
    """Phase 2 of DAR: the third branch of a block, gates and the branch's norm included."""
    rows = [torch.randn(1, tokens, width, device=device).to(dtype) for _ in range(2)]
    retrieved = torch.randn(2, 1, tokens, width, device=device).to(dtype)
    partition, coefficients = torch.randn(2, 1, tokens, device=device), torch.randn(2, 2, 1, tokens, device=device)
    queries, weight = 0.05 * torch.randn(2, width, device=device), torch.randn(width, device=device)
    gates = [p for values in (2, 2, 1) for p in gate(values, 2, width, device)]

    def call(read: Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
        def run(h: Tensor, z: Tensor, c: Tensor, q: Tensor, w: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            own = [GateParameters(*rest[3 * g : 3 * g + 3]) for g in range(3)]
            prefix, live, norm = Prefix(h, z), Live(rest[9:], c), Norm(w, EPS)
            h, *_, next_live = read(prefix, live, query=q, gates=own, route=DUAL, eps=EPS, norm=norm)
            return h, next_live.coefficients

        return run

    inputs = [retrieved, partition, coefficients, queries, weight, *gates, *rows]
    return Case(inputs, call(ops.gated_read), call(reference.gated_read), None)


def hyper_read_case(tokens: int, width: int, states: int, dtype: torch.dtype, device: str) -> Case:
    """The read of mHC-4: the second branch of a layer, Sinkhorn and the branch's norm included."""
    rows = [torch.randn(1, tokens, width, device=device).to(dtype) for _ in range(5)]
    coefficients, weight = torch.randn(5, 4, 1, tokens, device=device), torch.randn(width, device=device)
    gates = [p for values in (4, 4, 16) for p in gate(values, 4, width, device)]

    def call(read: Callable[..., Any]) -> Callable[..., Sequence[Tensor]]:
        def run(c: Tensor, w: Tensor, *rest: Tensor) -> Sequence[Tensor]:
            own = [GateParameters(*rest[3 * g : 3 * g + 3]) for g in range(3)]
            h, next_live = read(Live(rest[9:], c), gates=own, steps=20, eps=EPS, norm=Norm(w, EPS))
            return h, next_live.coefficients

        return run

    return Case([coefficients, weight, *gates, *rows], call(ops.hyper_read), call(reference.hyper_read), None)


def write_case(tokens: int, width: int, states: int, dtype: torch.dtype, device: str) -> Case:
    """The end of a DAR block of four branches."""
    rows = [torch.randn(1, tokens, width, device=device).to(dtype) for _ in range(4)]
    coefficients = torch.randn(4, 2, 1, tokens, device=device)

    def call(write: Callable[..., Tensor]) -> Callable[..., Sequence[Tensor]]:
        return lambda c, *rows: [write(Live(rows, c))]

    return Case([coefficients, *rows], call(ops.write), call(reference.write), None)


def gate(values: int, streams: int, width: int, device: str) -> list[Tensor]:
    """Weight, scale and bias."""
    shapes = (values, streams, width), (1,), (values,)
    return [0.05 * torch.randn(shape, device=device) for shape in shapes]


CASES: dict[str, Callable[[int, int, int, torch.dtype, str], Case]] = {
    "prefix": prefix_case,
    "prefix-one-stream": attnres_prefix_case,
    "read": read_case,
    "hyper_read": hyper_read_case,
    "write": write_case,
}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Milliseconds of each implementation, forward and backward, by round; the limits; what is kept."""
    inputs = [x.detach().requires_grad_() for x in case.inputs]
    ways = {"fused": case.fused, "equations": case.equations, "pseudocode": case.pseudocode}
    present = {name: way for name, way in ways.items() if way is not None}
    found: dict[str, Any] = {name: {"forward": [], "backward": []} for name in present}
    largest = max(case.inputs, key=Tensor.numel)
    buffers = [torch.randn_like(largest, dtype=torch.float32) for _ in range(9)]
    bandwidths = []
    for turn in range(rounds + WARM_UP):
        began = clock()
        for n in range(0, len(buffers), 3):
            torch.add(buffers[n], buffers[n + 1], out=buffers[n + 2])
        bandwidths.append(sum(b.nbytes for b in buffers) / (clock() - began))
        for name, way in present.items():
            began = clock()
            results = list(way(*inputs))
            middle = clock()
            given = [torch.ones_like(x) for x in results]
            ready = clock()
            torch.autograd.grad(results, inputs, given, allow_unused=True)
            ended = clock()
            del results, given
            if turn >= WARM_UP:
                found[name]["forward"].append(1e3 * (middle - began))
                found[name]["backward"].append(1e3 * (ended - ready))
    for name, way in present.items():
        found[name]["kept"] = kept(way, inputs)
    results = list(case.fused(*case.inputs))
    streams = [x.nbytes for x in case.inputs if x.shape[-1] == largest.shape[-1] and x.numel() * 4 > largest.numel()]
    out = sum(x.nbytes for x in results if x.shape[-1] == largest.shape[-1])
    bandwidths = bandwidths[WARM_UP:]
    found["limit"] = {
        "bandwidth": bandwidths,
        "forward": [1e3 * (sum(streams) + out) / bandwidth for bandwidth in bandwidths],
        "backward": [1e3 * (2 * sum(streams) + out) / bandwidth for bandwidth in bandwidths],
    }
    return found


def kept(way: Callable[..., Sequence[Tensor]], inputs: list[Tensor]) -> int:
    """Bytes that an implementation keeps for its backward pass besides its inputs."""
    given = {x.untyped_storage().data_ptr() for x in inputs}
    held: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = way(*inputs)
    results = list(results)
    return sum(size for place, size in held.items() if place not in given)


def clock() -> float:
    """The time after the device has finished."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def both(times: dict[str, Any]) -> list[float]:
    """Forward plus backward, by round."""
    return [f + b for f, b in zip(times["forward"], times["backward"], strict=True)]


def milliseconds(times: dict[str, Any]) -> list[str]:
    """Medians of the forward and of the backward pass."""
    return [f"{statistics.median(times[direction]):.1f}" for direction in ("forward", "backward")]


def spread(times: list[float], unit: list[float], digits: int) -> str:
    """Median, lowest and highest ratio over rounds."""
    ratios = [own / one for own, one in zip(times, unit, strict=True)]
    return f"{statistics.median(ratios):.{digits}f} ({min(ratios):.{digits}f}–{max(ratios):.{digits}f})"


def as_table(found: dict[str, Any]) -> str:
    """One row per operator and implementation."""
    rows = []
    for name, row in found.items():
        fused, limit = both(row["fused"]), both(row["limit"])
        for way in [key for key in row if key != "limit"]:
            rows.append(
                [
                    name,
                    way,
                    *milliseconds(row[way]),
                    spread(both(row[way]), fused, 1),
                    spread(both(row[way]), limit, 2),
                    f"{row[way]['kept'] / 2**20:.1f}",
                ]
            )
        rows.append([name, "limit", *milliseconds(row["limit"]), "", "1", ""])
    heads = ["operator", "implementation", "forward, ms", "backward, ms", "× fused", "× limit", "saved, MiB"]
    return table(heads, rows)


if __name__ == "__main__":
    main()

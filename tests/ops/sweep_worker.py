"""Wrong arguments for every public entry to the operators: `python -m tests.ops.sweep_worker`, from the root.

Prints one line per call before it is made, so that the last line names a call that ends the process. A call must work
or raise an exception whose message names what is wrong.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from dualres import ops
from dualres.model.block import embed, residual_stack
from dualres.ops import GateParameters, Live, Norm, Prefix, Route
from dualres.residual.live import of_streams
from dualres.residual.registry import METHODS

WIDTH, TOKENS = 8, (2, 3)
OWN = torch.ops.dualres
PYTORCH = ("size", "shape", "dimension", "dtype", "device", "tensor", "meta")  # of what PyTorch says by itself


def stream(*others: int) -> Tensor:
    return torch.randn(*others, *TOKENS, WIDTH)


def tokenwise(*others: int) -> Tensor:
    return torch.randn(*others, *TOKENS)


def gate(values: int, streams: int) -> list[Tensor]:
    return [torch.randn(values, streams, WIDTH), torch.randn(1), torch.randn(values)]


def entries() -> dict[str, tuple[Callable[..., Any], list[Any]]]:
    """Each with arguments that are right."""
    norm, gates = torch.randn(WIDTH), [*gate(2, 2), *gate(2, 2), *gate(1, 2)]
    dual = [stream(2), tokenwise(2), [stream(), stream()], tokenwise(2, 2), torch.randn(2, WIDTH), gates, norm]
    single = [stream(1), tokenwise(1), [stream()], tokenwise(1, 1), torch.randn(1, WIDTH), [], None]
    empty = [stream(2), tokenwise(2), [], None, None, gates[:6], None]
    hyper = [[stream(), stream(), stream()], tokenwise(3, 2), [*gate(2, 2), *gate(2, 2), *gate(4, 2)], norm]
    history, queries = [stream(2), stream(2)], torch.randn(3, 2, WIDTH)
    kept = [[tokenwise(2) for _ in range(3)], tokenwise(2, 3, 2), tokenwise(2, 2)]
    both: list[Any] = [[1, 0], [0, 1]]

    def with_carriers(read: list[Any], carriers: bool) -> list[Any]:
        h, z, u, c, *rest = read
        live = stream(c.shape[1]) if carriers else None
        return [h, z, stream(len(h)) if carriers else None, u, c, live, *rest]

    def grouped(flat: list[Tensor]) -> list[GateParameters]:
        return [GateParameters(*flat[n : n + 3]) for n in range(0, len(flat), 3)]

    def gated_read(h: Tensor, z: Tensor, u: Any, c: Any, q: Any, flat: list[Tensor], weight: Any, key: Any, value: Any):
        own = None if weight is None else Norm(weight, 1e-6)
        live, route = Live(tuple(u), c) if u else None, Route(key, value)
        return ops.gated_read(Prefix(h, z), live, query=q, gates=grouped(flat), route=route, eps=1e-6, norm=own)

    def read(h: Tensor, z: Tensor, u: Any, c: Any, q: Any, flat: Any, weight: Any, key: Any, value: Any) -> Any:
        own = None if weight is None else Norm(weight, 1e-6)
        live = Live(tuple(u), c) if u else None
        return ops.read(Prefix(h, z), live, query=q, route=Route(key, value), eps=1e-6, norm=own)

    def hyper_read(u: Any, c: Any, flat: list[Tensor], weight: Any, steps: int) -> Any:
        own = None if weight is None else Norm(weight, 1e-6)
        return ops.hyper_read(Live(tuple(u), c), gates=grouped(flat), steps=steps, eps=1e-6, norm=own)

    def logits(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Any:
        return ops.gate_logits(x, GateParameters(weight, scale, bias), 1e-6)

    numbers = [1e-6, 1e-6]
    found: dict[str, tuple[Callable[..., Any], list[Any]]] = {
        "ops.prefix": (lambda h, q, k, v: ops.prefix(h, q, route=Route(k, v), eps=1e-6), [history, queries, *both]),
        "ops.depth_weights": (
            lambda h, q, k, v: ops.depth_weights(h, q, route=Route(k, v), eps=1e-6),
            [history, queries, *both],
        ),
        "ops.gated_read": (gated_read, [*dual, *both]),
        "ops.gated_read without a live state": (gated_read, [*empty, *both]),
        "ops.read": (read, [*single, [0], [0]]),
        "ops.rms_norm": (lambda x, weight: ops.rms_norm(x, Norm(weight, 1e-6)), [stream(1), norm]),
        "ops.hyper_read": (hyper_read, [*hyper, 3]),
        "ops.write": (lambda u, c: ops.write(Live(tuple(u), c)), [[stream(), stream()], tokenwise(2, 2)]),
        "ops.gate_logits": (logits, [stream(2), *gate(3, 2)]),
        "ops.grouped_linear": (
            ops.grouped_linear,
            [torch.randn(6, WIDTH), torch.randn(2, 16, WIDTH), torch.tensor([2, 4])],
        ),
        "prefix": (OWN.prefix, [history, queries, *both, 1e-6]),
        "prefix_backward": (
            OWN.prefix_backward,
            [
                [stream(2) for _ in range(3)],
                [tokenwise(2) for _ in range(3)],
                [stream(2), stream(2)],
                history,
                queries,
                *kept,
                *both,
            ],
        ),
        "read": (OWN.read, [*with_carriers(dual, True), *both, 1, *numbers]),
        "read without gates": (OWN.read, [*with_carriers(single, False), [0], [0], 0, *numbers]),
        "read_backward": (
            OWN.read_backward,
            [stream(), tokenwise(3, 2), stream(2), stream(2), *with_carriers(dual, False), *both, 1, *numbers],
        ),
        "read_backward without gates": (
            OWN.read_backward,
            [stream(), torch.empty(0), None, None, *with_carriers(single, False), [0], [0], 0, *numbers],
        ),
        "hyper_read": (OWN.hyper_read, [*hyper[:2], stream(2), *hyper[2:], 2, 3, *numbers]),
        "hyper_read_backward": (
            OWN.hyper_read_backward,
            [stream(), tokenwise(4, 2), stream(2), *hyper[:2], None, *hyper[2:], 2, 3, *numbers],
        ),
        "write": (OWN.write, [[stream(), stream()], tokenwise(2, 2), stream(2), 1]),
        "write_backward": (OWN.write_backward, [stream(2), [stream()], tokenwise(2, 2), None, 1]),
        "grouped_linear": (
            OWN.grouped_linear,
            [torch.randn(6, WIDTH), torch.randn(2, 16, WIDTH), torch.tensor([2, 4])],
        ),
        "grouped_linear_weight_gradient": (
            OWN.grouped_linear_weight_gradient,
            [torch.randn(6, 16), torch.randn(6, WIDTH), torch.tensor([2, 4])],
        ),
        "of_streams": (lambda x: ops.write(of_streams(x)), [stream(2)]),
    }
    for method in METHODS:
        stack = residual_stack([torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)], WIDTH, method)
        found[f"residual_stack of {method}"] = (stack, [stream()])
        for name, block in (("first", next(iter(stack))), ("last", list(stack)[-1])):
            if not block.pathway.keeps_history:
                continue
            found[f"{name} block of {method}"] = (block, list(embed(stream(), stack.streams)))
            found[f"{name} pathway of {method}"] = (
                lambda *history, pathway=block.pathway: pathway.read(pathway.open(history), 0),
                list(embed(stream(), stack.streams)),
            )
    return found


def wrong_tensors(x: Tensor) -> Iterator[tuple[str, Any]]:
    if x.numel() == 0:
        return
    yield "no axes", torch.zeros((), dtype=x.dtype)
    yield "one axis less", x[0]
    yield "one axis more", x[None]
    yield "a longer first axis", torch.cat([x, x])
    if x.shape[0] > 1:
        yield "a shorter first axis", x[:1]
    yield "a longer last axis", torch.cat([x, x], -1)
    yield "a shorter last axis", x[..., :-1]
    yield "nothing in the first axis", x[:0]
    yield "nothing in the last axis", x[..., :0]
    yield "float64", x.double()
    yield "bfloat16", x.bfloat16()
    yield "integers", x.int()
    yield "on meta", x.to("meta")
    yield "transposed", x.mT if x.ndim > 1 else torch.stack([x, x], 1)[:, 0]
    yield "strided", torch.stack([x, x], -1)[..., 0]
    yield "expanded", x[:1].expand_as(x)


def wrong_numbers(x: list[int]) -> Iterator[tuple[str, Any]]:
    yield "a stream too many", [*x[:-1], 2]
    yield "a stream far too many", [*x[:-1], 1 << 40]
    yield "a negative stream", [*x[:-1], -1]
    yield "none", []
    yield "one more", [*x, 0]


def wrong(argument: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(argument, Tensor):
        yield from wrong_tensors(argument)
        yield "None", None
    elif isinstance(argument, list) and argument and isinstance(argument[0], Tensor):
        yield "an empty list", []
        yield "one less", argument[:-1]
        yield "one more", [*argument, argument[-1]]
        for place in {0, len(argument) - 1}:
            for how, other in wrong_tensors(argument[place]):
                yield f"{how} at {place}", [*argument[:place], other, *argument[place + 1 :]]
        yield "all on meta", [x.to("meta") for x in argument]
        yield "all float64", [x.double() for x in argument]
        yield "no tokens in any", [x[..., :0, :] for x in argument if x.ndim > 1]
    elif argument == []:
        yield "something", [stream()]
    elif isinstance(argument, list):
        yield from wrong_numbers(argument)
    elif argument is None:
        yield "something", torch.randn(WIDTH)
        yield "something else", tokenwise(2, 2)
    elif isinstance(argument, int):
        yield "zero", 0
        yield "negative", -1


def named(error: BaseException) -> bool:
    """Whether it says anything of what is wrong."""
    message = str(error).lower()
    ours = ("history", "queries", "route", "updates", "coefficients", "gate", "norm", "d_", "partition", "retrieved")
    more = ("streams", "candidates", "rows", "counts", "weight", "steps", "embedding", "logits", "argument", "gradient")
    return any(word in message for word in (*ours, *more, "width", *PYTORCH))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for name, (call, arguments) in entries().items():
        call(*arguments)
        for gradient in (False, True):
            for place, argument in enumerate(arguments):
                for how, other in wrong(argument):
                    print(f"{name}, argument {place}: {how}, {'with' if gradient else 'without'} grad", flush=True)
                    try:
                        with torch.set_grad_enabled(gradient):
                            found = call(*arguments[:place], other, *arguments[place + 1 :])
                        str(found)  # looks at all of it
                    except (AttributeError, TypeError) as error:
                        print("  ", type(error).__name__, error)
                        if other is not None and "argument" not in str(error):
                            print("UNNAMED", flush=True)
                    except (ValueError, RuntimeError, IndexError, NotImplementedError) as error:
                        print("  ", type(error).__name__, str(error)[:300])
                        if not named(error):
                            print("UNNAMED", flush=True)
    print("survived")


if __name__ == "__main__":
    main()

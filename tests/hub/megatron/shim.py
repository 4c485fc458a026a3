"""Lets Megatron-Core run on CPU processes, for tests only: `python -m tests.hub.megatron.shim MODULE ARGUMENTS …`.

Megatron calls CUDA in places that a machine without a GPU reaches. Here devices become the CPU, streams do nothing, and
the random state of "the GPU" is that of a generator of its own. What is computed stays Megatron's.
"""

import contextlib
import runpy
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch

CPU = torch.device("cpu")


class Stream:
    """Work on a CPU is done when the call returns: there is nothing to wait for."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, other: Any) -> None:
        pass

    def record_event(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)


def install() -> None:
    """Before anything imports `megatron`, which binds some of these names."""
    generator, stream = torch.Generator(), Stream()
    replaced: dict[str, Any] = {
        "current_device": lambda: CPU,
        "Stream": Stream,
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
        "stream": lambda _: contextlib.nullcontext(),
        "synchronize": lambda *_: None,
        "manual_seed": generator.manual_seed,
        "get_rng_state": lambda *_, **__: generator.get_state(),
        "default_generators": {CPU: generator},
        "_lazy_call": lambda call, **__: call(),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch.cuda.random.get_rng_state = replaced["get_rng_state"]

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    # Which Megatron does not define without TransformerEngine.
    moe_utils.te_general_gemm = None
    random.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: contextlib.nullcontext()
    token_dispatcher.maybe_move_tensor_to_cpu = moved_to_cpu


def moved_to_cpu(value: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Megatron's makes numbers of a tensor only on its way from a GPU."""
    return value.numpy() if as_numpy and isinstance(value, torch.Tensor) else value


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Megatron's, of what is not installed
    install()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__")

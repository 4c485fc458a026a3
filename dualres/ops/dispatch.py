"""Which kernels run on which device: the one place that decides.

DUALRES_OPS=reference, cpu or triton forces one kind everywhere (triton on a CPU needs TRITON_INTERPRET=1).
"""

import contextlib
import functools
import importlib
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from dualres.ops import checks
from dualres.util.optional_dependencies import available, install

Kind = Literal["reference", "cpu", "triton"]
KINDS = get_args(Kind)
BY_DEVICE: dict[str, Kind] = {"cpu": "cpu", "cuda": "triton"}  # ROCm devices are also called cuda
PACKAGES: dict[Kind, str] = {"cpu": "numba", "triton": "triton"}
REMEDIES: dict[Kind, str] = {
    "cpu": f"{install('cpu')} in a clone of dualres, or pip install numba",
    "triton": "pip install triton",
}
# The operators' namespace in `torch.ops`: dualres. Registering a name again frees the first operator, so code bundled
# with an exported model has one of its own, the name of its module in ASCII.
NAMESPACE = re.sub(r"[^0-9A-Za-z_]", lambda m: f"_{ord(m[0]):x}_", __name__.removesuffix(".ops.dispatch"))
LOG = "dualres.ops"  # the logger that is told when kernels are compiled
INTERPRETED = ("1", "true", "on")  # values of TRITON_INTERPRET that enable it


def _installed(kind: Kind) -> bool:
    """Whether the kernels and their compiler are installed; code bundled with an exported model has no kernels."""
    return available(f"{__package__}.{kind}") and available(PACKAGES[kind])


INSTALLED = {kind: _installed(kind) for kind in PACKAGES}
_noted: set[Kind] = set()  # kinds that `note` has reported as missing
FORCED: Any = os.environ.get("DUALRES_OPS") or None
if FORCED not in (None, *KINDS):
    raise ValueError(f"DUALRES_OPS={FORCED!r} is unknown: use one of {', '.join(KINDS)}, or leave it unset")


def kind(tensor: Tensor) -> Kind:
    """The implementation for `tensor`: the kernels of its device, or the equations if there are none."""
    if tensor.dtype not in checks.DTYPES or tensor.is_meta or transformed():
        return "reference"  # float64, shapes only, or derivatives that no kernel implements
    backend = _for_device(tensor)
    if backend == "reference" or INSTALLED[backend]:
        return backend
    if not torch.compiler.is_compiling():
        note(backend)
    return "reference"


def kernels(tensor: Tensor) -> Any:
    """The module of kernels for the device of `tensor`; not to be called if `kind` is "reference"."""
    backend = _for_device(tensor)
    if backend == "reference":
        raise RuntimeError(
            f"there are no kernels for tensors on {tensor.device}: call `dualres.ops`, which falls back to the "
            "reference implementation, or unset DUALRES_OPS"
        )
    return module(backend)


def _for_device(tensor: Tensor) -> Kind:
    on_cpu = tensor.is_cpu
    backend = FORCED or BY_DEVICE.get("cpu" if on_cpu else tensor.device.type, "reference")
    if backend == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") not in INTERPRETED:
        raise RuntimeError(
            "DUALRES_OPS=triton on a CPU needs Triton's interpreter, which is slow and only for tests: "
            "also set TRITON_INTERPRET=1, or unset DUALRES_OPS"
        )
    if backend == "cpu" and not on_cpu:
        raise RuntimeError(f"DUALRES_OPS=cpu is for CPUs, but the tensors are on {tensor.device}: unset DUALRES_OPS")
    return backend


def transformed() -> bool:
    """Whether `torch.func` (vmap, jvp, …) or forward-mode differentiation is active: kernels only support backward."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def traced(tensors: Sequence[Tensor]) -> bool:
    """Whether PyTorch must see the operator: in a graph, under a dispatch mode, or with a tensor of a subclass.

    A collective that is still under way returns such a tensor. Modes that only observe, such as `LiveBytes`, set
    `passive`: they see what kernels allocate.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return True
    for n in range(torch._C._len_torch_dispatch_stack()):
        if not getattr(torch._C._get_dispatch_stack_at(n), "passive", False):
            return True
    return not all(type(tensor) in (Tensor, Parameter) for tensor in tensors)


@contextlib.contextmanager
def for_shapes() -> Iterator[None]:
    """Use fused operators on any device, even if their compiler is not installed: enough to trace shapes."""
    global FORCED
    before, installed = FORCED, INSTALLED["cpu"]
    FORCED, INSTALLED["cpu"] = "cpu", True
    try:
        yield
    finally:
        FORCED, INSTALLED["cpu"] = before, installed


@functools.cache
def module(kind: Kind) -> Any:
    """`dualres.ops.cpu` or `dualres.ops.triton`."""
    try:
        return importlib.import_module(f"{__package__}.{kind}")
    except ImportError as error:
        raise ImportError(
            f"{PACKAGES[kind]} is installed but cannot be used ({error}): install a compatible version, "
            "or set DUALRES_OPS=reference for plain PyTorch"
        ) from error


def announce(device: torch.device, say: Callable[[str], None]) -> None:
    """Say now, instead of warning later, that operators on this device will run as plain PyTorch."""
    backend = FORCED or BY_DEVICE.get(device.type, "reference")
    if backend != "reference" and not INSTALLED[backend]:
        note(backend, say)


def note(kind: Kind, say: Callable[[str], None] = warnings.warn) -> None:
    """Say once that the kernels, or the package that compiles them, are missing."""
    if kind in _noted:
        return
    _noted.add(kind)
    kernels_exist = available(f"{__package__}.{kind}")
    missing = PACKAGES[kind] if kernels_exist else "dualres"
    remedy = REMEDIES[kind] if kernels_exist else "install dualres from its repository"
    say(f"{missing} is not installed, so residual pathways run as plain PyTorch, slower and with more memory: {remedy}")

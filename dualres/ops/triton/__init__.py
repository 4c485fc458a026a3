"""The fused operators as Triton kernels; `autograd` defines what each computes and returns."""

from dualres.ops.triton.hyper import hyper_read
from dualres.ops.triton.hyper_backward import hyper_read_backward
from dualres.ops.triton.prefix import prefix, prefix_backward
from dualres.ops.triton.read import read
from dualres.ops.triton.read_backward import read_backward
from dualres.ops.triton.write import write, write_backward

__all__ = [
    "hyper_read",
    "hyper_read_backward",
    "prefix",
    "prefix_backward",
    "read",
    "read_backward",
    "write",
    "write_backward",
]

"""The fused operators as Triton kernels; `autograd` defines what each computes and returns."""

from dualres.ops.triton.hyper import hyper_read, hyper_read_backward
from dualres.ops.triton.live import read, read_backward, write, write_backward
from dualres.ops.triton.prefix import prefix, prefix_backward

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

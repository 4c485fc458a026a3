"""Kernels for a CPU, compiled by numba: vector instructions, a token at a time, tokens shared out over threads."""

from dualres.ops.native.hyper import hyper_read, hyper_read_backward
from dualres.ops.native.prefix import prefix, prefix_backward
from dualres.ops.native.read import read, read_backward
from dualres.ops.native.write import write, write_backward

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

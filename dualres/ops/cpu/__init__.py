"""The fused operators as CPU kernels, compiled by numba; `autograd` defines what each computes and returns.

They are vectorized over the width; tokens are split across threads.
"""

from dualres.ops.cpu.hyper import hyper_read, hyper_read_backward
from dualres.ops.cpu.live import write, write_backward
from dualres.ops.cpu.prefix import prefix, prefix_backward
from dualres.ops.cpu.prepared import Prepared
from dualres.ops.cpu.read import read, read_backward
from dualres.ops.cpu.replay import replay

__all__ = [
    "Prepared",
    "hyper_read",
    "hyper_read_backward",
    "prefix",
    "prefix_backward",
    "read",
    "read_backward",
    "replay",
    "write",
    "write_backward",
]

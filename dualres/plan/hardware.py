"""Assumptions of a plan about GPUs and links. The defaults are the data sheet of an H100 SXM, not measurements."""

import math
from typing import NamedTuple

GIB = 2**30
USABLE = 0.9  # fraction of a GPU's memory; the rest is for its driver, NCCL and allocator fragmentation


class Hardware(NamedTuple):
    """One GPU and its links, in bytes, flops and seconds."""

    memory: float = math.inf  # unknown
    node_size: int = 8  # GPUs that share the fast links
    peak_flops: float = 989e12  # bfloat16, dense
    utilization: float = 0.5  # fraction of peak achieved, including overhead between matmuls
    memory_bandwidth: float = 3.35e12
    node_bandwidth: float = 450e9  # to other GPUs of its node, in each direction
    network_bandwidth: float = 50e9  # per-GPU NIC, in each direction

    def ring(self, ranks: int, stride: int) -> float:
        """Bandwidth of a ring all-gather, reduce-scatter or all-reduce among ranks `stride` apart.

        The ring crosses each node boundary once, using the NICs of all its ranks on that node.
        """
        ranks_per_node = max(1, self.node_size // stride)
        if ranks * stride <= self.node_size:
            return self.node_bandwidth
        return min(self.node_bandwidth, ranks_per_node * self.network_bandwidth)

    def exchange_seconds(self, sent: int, ranks: int) -> float:
        """Seconds for an all-to-all among consecutive ranks, which fill one node after another."""
        if ranks <= self.node_size:
            return sent / self.node_bandwidth
        remote = (ranks - self.node_size) / (ranks - 1)
        return max(sent * remote / self.network_bandwidth, sent * (1 - remote) / self.node_bandwidth)

    def next_stage(self, processes: int) -> float:
        """Bandwidth between pipeline ranks: the slowest link, between nodes, is the bottleneck."""
        return self.node_bandwidth if processes <= self.node_size else self.network_bandwidth

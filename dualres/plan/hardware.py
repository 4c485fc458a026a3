"""What a plan assumes about GPUs and links. The defaults are the data sheet of an H100 SXM; nothing was measured."""

import math
from typing import NamedTuple

GIB = 2**30
USABLE = 0.9  # of a GPU's memory: the rest is for its driver, NCCL and allocator fragmentation


class Hardware(NamedTuple):
    """One GPU and what connects it. Bytes, flops and seconds."""

    memory: float = math.inf  # not given
    node_size: int = 8  # GPUs that share the fast links
    peak_flops: float = 989e12  # bfloat16, dense
    utilization: float = 0.5  # share of it that matrix products reach, with what lies between them
    memory_bandwidth: float = 3.35e12
    node_bandwidth: float = 450e9  # to the others of its node, in each direction
    network_bandwidth: float = 50e9  # of its own network card, in each direction

    def ring(self, ranks: int, stride: int) -> float:
        """Bytes per second of a gather, scatter or sum among ranks that are `stride` apart.

        A ring leaves each node once, over the cards of all its members there.
        """
        inside = max(1, self.node_size // stride)
        if ranks * stride <= self.node_size:
            return self.node_bandwidth
        return min(self.node_bandwidth, inside * self.network_bandwidth)

    def exchange_seconds(self, sent: int, ranks: int) -> float:
        """Of an all-to-all among neighbors that fill nodes first."""
        if ranks <= self.node_size:
            return sent / self.node_bandwidth
        away = (ranks - self.node_size) / (ranks - 1)
        return max(sent * away / self.network_bandwidth, sent * (1 - away) / self.node_bandwidth)

    def next_stage(self, processes: int) -> float:
        """Bytes per second between pipeline ranks: the stage that sends to another node sets the pace."""
        return self.node_bandwidth if processes <= self.node_size else self.network_bandwidth

    def describe(self) -> str:
        return (
            f"{self.peak_flops / 1e12:g} Tflop/s of which matrix products reach "
            f"{self.utilization:.0%}, memory {self.memory_bandwidth / 1e12:g} TB/s; nodes of {self.node_size}, "
            f"{self.node_bandwidth / 1e9:g} GB/s inside, {self.network_bandwidth / 1e9:g} GB/s per GPU between them"
        )

"""Linear CKA: how similarly two streams represent the same tokens, at the same depth or at different ones.

CKA(X, Y) = ‖Yᵀ X‖² / (‖Xᵀ X‖ ‖Yᵀ Y‖) with Frobenius norms, X and Y centered by column (Kornblith et al., 2019).
"""
# N tokens  D width  J streams  L layers

from typing import Any

import torch
from torch import Tensor

from dualres.analyze.taps import Site, Watcher
from dualres.residual.pathway import Pathway
from dualres.util.progress import Show, silent


class StreamStates(Watcher):
    """The live streams after the MLP of every layer, at the last `last` tokens of each sequence."""

    def __init__(self, last: int):
        self.last = last
        self.by_layer: dict[int, list[Tensor]] = {}  # one tensor per forward pass (J,B·last,D)

    def on_write(self, site: Site, pathway: Pathway, state: Any) -> None:
        if site.ends_layer:
            streams = pathway.streams(state)
            assert streams is not None
            tail = streams.detach()[:, :, -self.last :].flatten(1, 2)
            self.by_layer.setdefault(site.layer, []).append(tail.clone())

    def states(self) -> list[Tensor]:
        """L × (J,N,D), the tokens of all forward passes concatenated."""
        return [torch.cat(parts, 1) for _, parts in sorted(self.by_layer.items())]


def cross_stream_cka(states: list[Tensor], show: Show = silent) -> Tensor:
    """CKA of every two streams at every two layers. L × (J,N,D) -> (J,J,L,L); [i,j,m,n]: stream i at m, j at n

    NaN where a stream is constant over tokens.
    """
    streams, layers = len(states[0]), len(states)
    kernels: list[_Kernel] = []  # stream by stream, layer by layer
    for j in range(streams):
        for layer, state in enumerate(states):
            show(f"CKA  stream {j}, layer {layer + 1}/{layers}", len(kernels) / (streams * layers))
            kernels.append(_Kernel(state[j]))
    similarities = torch.empty(len(kernels), len(kernels), dtype=torch.float64)
    for a, one in enumerate(kernels):
        show(f"CKA  {a + 1}/{len(kernels)} states compared", a / len(kernels))
        for b in range(a, len(kernels)):
            cka = one.similarity(kernels[b]) / (one.norm * kernels[b].norm)
            similarities[a, b] = similarities[b, a] = cka
    return similarities.view(streams, layers, streams, layers).transpose(1, 2).contiguous()


def same_layer_cka(states: list[Tensor]) -> Tensor:
    """CKA of streams 0 and 1 after each layer. L × (J,N,D) -> (L,)"""
    pairs = [(_Kernel(state[0]), _Kernel(state[1])) for state in states]
    return torch.stack([one.similarity(other) / (one.norm * other.norm) for one, other in pairs])


class _Kernel:
    """Centered states X, stored as X Xᵀ if that is the smaller matrix: ‖Yᵀ X‖² = ⟨X Xᵀ, Y Yᵀ⟩."""

    def __init__(self, x: Tensor):
        centered = x.double() - x.double().mean(0)  # (N,D)
        self.by_token = len(x) <= x.shape[1]
        self.matrix = centered @ centered.T if self.by_token else centered
        self.norm = self.similarity(self).sqrt()

    def similarity(self, other: "_Kernel") -> Tensor:
        """‖Yᵀ X‖²"""
        if self.by_token:
            return (self.matrix * other.matrix).sum()
        return (self.matrix.T @ other.matrix).square().sum()

"""The live streams of a block as a weighted sum of what was written to it: P^j = Σ_k C_k^j u_k. They are not stored.

Transport and mixing then act on token-wise coefficients: M P + β u has the updates (…, u) and the coefficients
[M C, β]. A block keeps its branch outputs for the backward pass, D numbers per branch, and no stream.
"""
# B batch  T tokens  D width  J streams  K updates

import torch
from torch import Tensor

from dualres import ops
from dualres.ops import Live

MOST_WRITES = 4  # beyond the streams that a sum started from; every read sums anew, and storing the streams moves less


def shortened(live: Live) -> Live:
    """The same streams as a sum of few terms."""
    return live if len(live.updates) < live.coefficients.shape[1] + MOST_WRITES else of_streams(ops.write(live))


def of_streams(streams: Tensor) -> Live:
    """Stored streams as live ones, each an update of its own. (J,B,T,D)"""
    return Live(streams.unbind(0), _identity(streams[0], len(streams), 1))


def plus(live: Live | None, updates: tuple[Tensor, ...]) -> Live:
    """Add to each of the J streams, without gates. J × (B,T,D)"""
    together = (*(live.updates if live else ()), *updates)
    return Live(together, _identity(updates[0], len(updates), len(together) // len(updates)))


def _identity(update: Tensor, streams: int, times: int) -> Tensor:
    """Coefficients of updates (B,T,D) that go to one stream each, in turn. -> (times·J,J,B,T)"""
    precise = torch.promote_types(update.dtype, torch.float32)
    unit = torch.eye(streams, dtype=precise, device=update.device).repeat(times, 1)
    tokens = update.shape[:-1]
    return unit.view(*unit.shape, *[1] * len(tokens)).expand(*unit.shape, *tokens).contiguous()

"""The live streams of a block as a weighted sum of its updates: P^j = Σ_k C_k^j u_k. The streams are not stored.

Transport and mixing then act on token-wise coefficients: M P + β u has the updates (…, u) and the coefficients
[M C, β]. For the backward pass a block saves its branch outputs, D numbers per branch, and no streams. A read merges
the live streams with the retrieved history: `merge` in ops/reference.py.
"""
# B batch  T tokens  D width  J streams  K updates

import torch
from torch import Tensor

from dualres import ops
from dualres.ops import Live

MAX_WRITES = 4  # beyond the initial terms; every read recomputes the sum, so longer sums are stored as streams


def shortened(live: Live) -> Live:
    """The same streams as a sum of at most J + MAX_WRITES − 1 terms."""
    return live if len(live.updates) < live.coefficients.shape[1] + MAX_WRITES else of_streams(ops.write(live))


def of_streams(streams: Tensor) -> Live:
    """Stored streams as live streams, each with itself as its only update, and as their own carrier. (J,B,T,D)"""
    return Live(streams.unbind(0), _identity(streams[0], len(streams), 1), streams, len(streams))


def as_tensor(live: Live | Tensor) -> Tensor:
    """Live streams as one tensor, which some pathways store and others sum. -> (J,B,T,D)"""
    return live if isinstance(live, Tensor) else ops.write(live)


def plus(live: Live | None, updates: tuple[Tensor, ...]) -> Live:
    """The live streams with one ungated update added to each. J × (B,T,D)"""
    before, carrier, carried = (live.updates, live.carrier, live.carried) if live else ((), None, 0)
    all_updates = (*before, *updates)
    coefficients = _identity(updates[0], len(updates), len(all_updates) // len(updates))
    return Live(all_updates, coefficients, carrier, carried)


def appended(live: Live, update: Tensor) -> Live:
    """The live streams of a gated read with the branch output that its last coefficients wait for. (B,T,D)"""
    return Live((*live.updates, update), *live[1:])


def _identity(update: Tensor, streams: int, times: int) -> Tensor:
    """The coefficients of updates that each go to one stream, in turn. -> (times·J,J,B,T)"""
    precise, tokens = torch.promote_types(update.dtype, torch.float32), update.shape[:-1]
    if streams == 1:
        return torch.ones((times, 1, *tokens), dtype=precise, device=update.device)
    unit = torch.eye(streams, dtype=precise, device=update.device).repeat(times, 1)
    return unit.view(*unit.shape, *[1] * len(tokens)).expand(*unit.shape, *tokens).contiguous()

"""Pipeline parallelism with a cached history: each rank caches the states it has seen and receives only missing ones.

The N blocks are split into C = P·V chunks. Chunk c is on rank c mod P, so a rank with V chunks sees each micro-batch V
times. Its first pass leaves the history to the later ones; between passes it receives only states of the P − 1 chunks
on other ranks. In the backward pass the gradient of a state accumulates on the rank that caches it and is sent once to
the rank it came from. State H_b is the output of block b (1 … N); H_0 is the embedding, whose equal streams are sent
as one.
"""
# B batch  T tokens (of this rank's part of the sequence)  D width  J streams

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _RecvInfo

from dualres.model.attention import RouterReport, causal_mask, token_positions
from dualres.model.block import ResidualBlock, after, embed
from dualres.model.decoder import Vocabulary
from dualres.model.loss import Objective
from dualres.parallel.mesh import Mesh

Leaves = dict[int, Tensor]  # states that later passes of this rank read, by number; they accumulate gradients


class Boundary(NamedTuple):
    """The states between chunks c−1 and c."""

    sent: tuple[int, ...]  # in order of depth
    cached: tuple[int, ...]  # left on the rank of chunk c by an earlier pass


def boundaries(chunks: Sequence[int], ranks: int, *, keeps_history: bool, resend: bool = False) -> list[Boundary]:
    """The C−1 boundaries between chunks of `chunks` blocks each; `resend` disables the cache, for comparison."""
    seen: list[set[int]] = [set() for _ in range(ranks)]
    result, state = [], 0
    for number, blocks in enumerate(chunks):
        here = seen[number % ranks]
        if number > 0:
            needed = range(state + 1) if keeps_history else (state,)
            known = here if keeps_history and not resend else set()
            result.append(Boundary(tuple(s for s in needed if s not in known), tuple(s for s in needed if s in known)))
        here.update(range(state + blocks + 1))
        state += blocks
    return result


class PipelineChunk(nn.Module):
    """Consecutive blocks of a decoder. The first chunk embeds; the last has the readout and the loss."""

    def __init__(
        self,
        objective: Objective,
        blocks: range,
        arriving: Boundary | None,
        leaving: Boundary | None,
        to_cache: tuple[int, ...],
        cache: dict[int, Leaves],
    ):
        super().__init__()
        decoder = objective.decoder
        stack = decoder.stack
        self.blocks = nn.ModuleList(stack.blocks[b] for b in blocks)
        ends: list[nn.Module] = [decoder.vocabulary] if arriving is None else []
        ends += [stack.readout, decoder.norm, decoder.vocabulary] if leaving is None else []
        self.ends = nn.ModuleList(ends)
        self.first = blocks.start  # the newest state that the first block reads
        self.arriving, self.leaving, self.to_cache = arriving, leaving, to_cache
        self.cache = cache  # of the rank, by micro-batch
        self.objective = (objective,)  # in a tuple, since not all its parameters belong to this chunk

    def forward(
        self, *received: Tensor, sequences: Tensor, number: Tensor, reports: Mapping[int, RouterReport]
    ) -> tuple[Tensor, ...] | Tensor:
        """The states that the next rank lacks, or the loss. received: `arriving.sent`; sequences (B,T+1)

        States are (J,B,T,D), H_0 is (B,T,D); number: of the micro-batch in its step.
        """
        (objective,), batch = self.objective, int(number)
        decoder, tokens = objective.decoder, sequences[:, :-1]
        leaves = self.cache.setdefault(batch, {}) if self.to_cache else self.cache.pop(batch, {})
        if self.arriving is None:
            states = {0: decoder.vocabulary.embed(tokens)}
        else:
            states = dict(zip(self.arriving.sent, received, strict=True))
        states |= {s: cached(state, leaves, s) for s, state in states.items() if s in self.to_cache}
        if self.arriving is not None:
            states |= {s: leaves[s] for s in self.arriving.cached}

        history = tuple(embed(states[s], decoder.stack.streams)[0] if s == 0 else states[s] for s in sorted(states))
        positions = token_positions(tokens.shape[1], 0, None, tokens.device)
        mask = causal_mask(tokens.shape[1], 0, None, objective.documents(tokens), tokens.device)
        context = decoder.context(history[0], positions, mask, report=reports.get(batch))
        for b, block in enumerate(cast(Sequence[ResidualBlock], self.blocks), self.first + 1):
            history = after(block, history, context=context)
            if b in self.to_cache:
                history = (*history[:-1], cached(history[-1], leaves, b))
            states[b] = history[-1]
        if self.leaving is not None:
            return tuple(states[s] for s in self.leaving.sent)
        return objective.loss(decoder.norm(decoder.stack.readout(*history)), sequences)


def cached(state: Tensor, leaves: Leaves, number: int) -> Tensor:
    """The state; a leaf copy is cached for later passes, and its gradient is added to the state's.

    Later passes run backward first, so the leaf's gradient is complete by then.
    """
    leaf = state.detach().requires_grad_(state.requires_grad)
    leaves[number] = leaf
    state = state.view_as(state)
    if state.requires_grad:
        state.register_hook(lambda grad: grad if leaf.grad is None else grad + leaf.grad)
    return state


class Stage(PipelineStage):
    """PyTorch's stage, with receive buffers only for the micro-batches in flight.

    (PyTorch allocates them for all micro-batches of a step, each as large as a history.)
    """

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        _release(*self.args_recv_info.values())

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        _release(*self.grad_recv_info.values())

    def _get_recv_ops(self, recv_infos: tuple[_RecvInfo, ...]) -> list[dist.P2POp]:
        """Allocate the buffers of a micro-batch first, for its states or its gradients."""
        for info in recv_infos:
            if not info.is_root_arg and info.tensor_meta is not None:
                info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=self.device)
        return super()._get_recv_ops(recv_infos)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Also release the receive buffers of this micro-batch."""
        ops = super().get_bwd_send_ops(bwd_chunk_id)
        _release(self.args_recv_info[bwd_chunk_id], self.grad_recv_info[bwd_chunk_id])
        return ops


def _release(*micro_batches: tuple[_RecvInfo, ...]) -> None:
    for info in itertools.chain(*micro_batches):
        info.buffer = None


def drop_unused(vocabulary: Vocabulary, chunk: PipelineChunk) -> None:
    """Keep the half of an untied vocabulary that this end of the pipeline uses."""
    if vocabulary.output is None:
        return
    unused = (vocabulary.output, vocabulary.narrow) if chunk.arriving is None else (vocabulary.table, vocabulary.widen)
    for part in unused:
        if part is not None:
            part.to("meta")


def micro_batches(global_batch: int, micro_batch: int, mesh: Mesh) -> int:
    """The number of micro-batches per data-parallel rank and step, including zero-weight padding."""
    count = -(-global_batch // micro_batch // mesh.data)
    return count if mesh.pipeline == 1 else padded_micro_batches(count, mesh.pipeline, mesh.virtual)


def padded_micro_batches(count: int, ranks: int, virtual: int) -> int:
    """`count` rounded up to what the schedule needs: at least one per rank for 1F1B, whole rounds if interleaved."""
    if virtual == 1:
        return max(count, ranks)
    return next(n for n in range(count, 2 * count + ranks) if n % max(1, n // ranks) == 0)


def make_schedule(stages: Sequence[Stage], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """1F1B; interleaved if a rank has several stages."""
    # A state that is cached and sent is a view, and nothing changes a state in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    if len(stages) == 1:
        return Schedule1F1B(stages[0], micro_batches, loss, scale_grads=False)
    return ScheduleInterleaved1F1B(list(stages), micro_batches, loss, scale_grads=False)


def make_chunks(objective: Objective, sizes: Sequence[int], ranks: int, rank: int) -> dict[int, PipelineChunk]:
    """The chunks of one rank, by number; chunk c has `sizes[c]` blocks."""
    between = boundaries(sizes, ranks, keeps_history=objective.decoder.stack.keeps_history)
    starts = [sum(sizes[:c]) for c in range(len(sizes))]
    cache: dict[int, Leaves] = {}
    chunks = {}
    for c in range(rank, len(sizes), ranks):
        arriving = between[c - 1] if c > 0 else None
        later = between[c + ranks - 1].cached if c + ranks < len(sizes) else ()
        known = arriving.cached if arriving is not None else ()
        chunks[c] = PipelineChunk(
            objective,
            range(starts[c], starts[c] + sizes[c]),
            arriving,
            between[c] if c < len(between) else None,
            tuple(s for s in later if s not in known),
            cache,
        )
    return chunks

"""Pipeline parallelism with a cached history: every rank keeps the states it has seen, and is sent what it lacks.

Chunk c of a decoder lies on rank c mod P, so a rank with V chunks passes a micro-batch on V times. Its first pass
leaves the history for the later ones; between passes only states of the P − 1 chunks on other ranks arrive. On the way
back a state's gradient gathers on the rank that has it, and is sent once to the rank it came from. H_0 has equal
streams and travels as one.
"""
# B batch  T tokens (of this rank's share of the sequence)  D width  J streams

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.pipelining.stage import _RecvInfo

from dualres.model.block import ResidualBlock, after
from dualres.model.context import RouterReport, causal_mask
from dualres.model.decoder import Vocabulary
from dualres.model.loss import Objective
from dualres.parallel.history_cache import Boundary, boundaries
from dualres.parallel.mesh import Mesh
from dualres.residual.pathway import embed

# A state that is kept and sent is a view, and nothing changes a state in place.
warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")

Leaves = dict[int, Tensor]  # states that later passes of this rank read, by number, with the gradient they gather


class PipelineChunk(nn.Module):
    """Some blocks of a decoder that follow each other. The first chunk embeds, the last reads out and has the loss."""

    def __init__(
        self,
        objective: Objective,
        blocks: range,
        arriving: Boundary | None,
        leaving: Boundary | None,
        kept: tuple[int, ...],
        cache: dict[int, Leaves],
    ):
        super().__init__()
        decoder = objective.decoder
        stack = decoder.stack
        self.blocks = nn.ModuleList(stack.blocks[b] for b in blocks)
        ends: list[nn.Module] = [decoder.vocabulary] if arriving is None else []
        ends += [stack.readout, decoder.norm, decoder.vocabulary] if leaving is None else []
        self.ends = nn.ModuleList(ends)
        self.first = blocks.start  # the state that the first block finds last
        self.arriving, self.leaving, self.kept = arriving, leaving, kept
        self.cache = cache  # of the rank, by micro-batch
        self.objective = (objective,)  # in a tuple: its parameters are not all of this chunk

    def forward(
        self, *received: Tensor, sequences: Tensor, number: Tensor, reports: Mapping[int, RouterReport]
    ) -> tuple[Tensor, ...] | Tensor:
        """The states that the next rank lacks, or the loss. received: as `arriving` says; sequences (B,T+1)

        States are (J,B,T,D), H_0 is (B,T,D); number: which micro-batch of the step it is.
        """
        (objective,), batch = self.objective, int(number)
        decoder, tokens = objective.decoder, sequences[:, :-1]
        leaves = self.cache.setdefault(batch, {}) if self.kept else self.cache.pop(batch, {})
        if self.arriving is None:
            states = {0: decoder.vocabulary.embed(tokens)}
        else:
            states = dict(zip(self.arriving.sent, received, strict=True))
        states |= {s: keep(state, leaves, s) for s, state in states.items() if s in self.kept}
        if self.arriving is not None:
            states |= {s: leaves[s] for s in self.arriving.cached}

        history = tuple(embed(states[s], decoder.stack.streams)[0] if s == 0 else states[s] for s in sorted(states))
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        mask = causal_mask(tokens.shape[1], 0, None, objective.documents(tokens), tokens.device)
        context = decoder.context(history[0], positions, mask, report=reports.get(batch))
        for made, block in enumerate(cast(Sequence[ResidualBlock], self.blocks), self.first + 1):
            history = after(block, history, context=context)
            if made in self.kept:
                history = (*history[:-1], keep(history[-1], leaves, made))
            states[made] = history[-1]
        if self.leaving is not None:
            return tuple(states[s] for s in self.leaving.sent)
        return objective.loss(decoder.norm(decoder.stack.readout(*history)), sequences)


def keep(state: Tensor, leaves: Leaves, number: int) -> Tensor:
    """The state for this pass, and a leaf of it for later ones, whose gradient joins it on the way back."""
    leaf = state.detach().requires_grad_(state.requires_grad)
    leaves[number] = leaf
    return CachedState.apply(state, [leaf])


class CachedState(torch.autograd.Function):
    """Passes a state on; its gradient is that of this pass and what the later passes of the rank have left."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, leaf: list[Tensor]) -> Tensor:
        """state, unchanged; the leaf is in a list so that no gradient goes to it from here."""
        ctx.leaf = leaf
        return state.view_as(state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Later passes go back first, so theirs is complete."""
        later = ctx.leaf[0].grad
        return grad if later is None else grad + later, None


class Stage(PipelineStage):
    """PyTorch's stage, which counts what it sends and has buffers only for micro-batches that are on their way.

    (PyTorch's own allocates them for all micro-batches of a step: of a history, that many times.)
    """

    def __init__(self, chunk: nn.Module, index: int, count: int, device: torch.device, **options: Any):
        super().__init__(chunk, index, count, device, **options)
        self.sent = {"states": 0, "gradients": 0}  # bytes

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(num_microbatches, has_backward)
        for infos in self.args_recv_info.values():
            _release(infos)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(num_microbatches)
        for infos in self.grad_recv_info.values():
            _release(infos)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Buffers now, for this micro-batch."""
        _allocate(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Buffers now, for this micro-batch."""
        if self.has_backward and not self.is_last:
            _allocate(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Counted."""
        return self._count("states", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Counted; what was received for this micro-batch is not needed any more."""
        ops = self._count("gradients", super().get_bwd_send_ops(bwd_chunk_id))
        _release(self.args_recv_info[bwd_chunk_id])
        if not self.is_last:
            _release(self.grad_recv_info[bwd_chunk_id])
        return ops

    def _count(self, kind: str, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent[kind] += sum(op.tensor.nbytes for op in ops)
        return ops


def _allocate(infos: tuple[_RecvInfo, ...], device: torch.device) -> None:
    for info in infos:
        if not info.is_root_arg and info.tensor_meta is not None:
            info.buffer = torch.empty(info.tensor_meta.shape, dtype=info.tensor_meta.dtype, device=device)


def _release(infos: tuple[_RecvInfo, ...]) -> None:
    for info in infos:
        info.buffer = None


def drop_unused(vocabulary: Vocabulary, chunk: PipelineChunk) -> None:
    """Of a vocabulary whose output has weights of its own, leave an end of the pipeline the half that it uses."""
    if vocabulary.output is None:
        return
    unused = (vocabulary.output, vocabulary.narrow) if chunk.arriving is None else (vocabulary.table, vocabulary.widen)
    for part in unused:
        if part is not None:
            part.to("meta")


class ForwardPipeline:
    """A rank's chunks in the order of a micro-batch that only goes forward."""

    def __init__(self, stages: Sequence[Stage], shapes: Mapping[int, list[Tensor]], group: dist.ProcessGroup):
        self.stages, self.shapes, self.group = stages, shapes, group

    @torch.no_grad()
    def run(self, sequences: Tensor, device: torch.device) -> Tensor | None:
        """The loss, on the rank with the last chunk: the others are done when they have sent. (B,T+1) -> () or None"""
        loss, ranks, here = None, dist.get_world_size(self.group), dist.get_rank(self.group)
        for stage in self.stages:
            received = []
            for meta in self.shapes[stage.stage_index]:
                rows = len(sequences)  # of a last batch, fewer than in training
                buffer = torch.empty(*meta.shape[:-3], rows, *meta.shape[-2:], dtype=meta.dtype, device=device)
                dist.recv(buffer, group=self.group, group_src=(here - 1) % ranks)
                received.append(buffer)
            out = stage.submod(*received, sequences=sequences, number=torch.tensor(-1), reports={})
            if isinstance(out, Tensor):
                loss = out
                continue
            for state in out:
                dist.send(state.contiguous(), group=self.group, group_dst=(here + 1) % ranks)
        return loss


def micro_batches(global_batch: int, micro_batch: int, mesh: Mesh) -> int:
    """How many a data-parallel rank runs in a step; some may be there only to fill up."""
    count = -(-global_batch // micro_batch // mesh.data)
    return count if mesh.pipeline == 1 else padded_micro_batches(count, mesh.pipeline, mesh.virtual)


def padded_micro_batches(count: int, ranks: int, virtual: int) -> int:
    """How many the schedule needs for `count`: 1F1B at least one per rank, the interleaved one whole rounds."""
    if virtual == 1:
        return max(count, ranks)
    return next(n for n in range(count, 2 * count + ranks) if n % max(1, n // ranks) == 0)


def make_schedule(stages: Sequence[Stage], micro_batches: int, loss: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """1F1B; interleaved where a rank has several stages."""
    if len(stages) == 1:
        return Schedule1F1B(stages[0], micro_batches, loss, scale_grads=False)
    return ScheduleInterleaved1F1B(list(stages), micro_batches, loss, scale_grads=False)


def make_chunks(
    objective: Objective, sizes: Sequence[int], ranks: int, rank: int, *, resend: bool = False
) -> dict[int, PipelineChunk]:
    """The chunks of one rank by number, of `sizes` blocks each. `resend`: no rank keeps anything, for comparison."""
    keeps_history = next(iter(objective.decoder.stack)).pathway.keeps_history
    between = boundaries(sizes, ranks, keeps_history=keeps_history, resend=resend)
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

"""A block of few tokens without gradients, as in generation: all of its calls are prepared once.

For a few tokens, what Python does around a kernel takes longer than the kernel. So the calls of a block are recorded
once for every set of parameters, with all addresses. What they compute lies in one buffer. Every pass through the block
has a buffer of its own: it moves the addresses there, fills in those of the history and of the branch outputs as they
come, and calls the kernels.
"""
# B batch  T tokens  N = B·T  D width  J stored streams  O output streams  R history  U query sets  S branches

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from dualres.ops.arguments import BlockArguments, PrefixArguments, ReadArguments, WriteArguments
from dualres.ops.cpu.launch import MIN_TOKENS, recorded, run_here
from dualres.ops.cpu.live import write
from dualres.ops.cpu.prefix import prefix, stream_addresses
from dualres.ops.cpu.read import read
from dualres.ops.cpu.rows import LINE

MAX_TOKENS = 2 * MIN_TOKENS - 1  # with more, a kernel uses several threads
MAX_PROGRAMS = 1024
PLAIN = {Tensor, Parameter}
DTYPE, CONTIGUOUS, ADDRESS = attrgetter("dtype"), Tensor.is_contiguous, Tensor.data_ptr
_programs: dict[tuple[Any, ...], "Program"] = {}


def session(block: BlockArguments) -> "Session | None":
    """A pass through a block; None if it is not made for these tensors."""
    state, parameters = block.history[0], block.parameters()
    tensors = [*block.history, *parameters]
    if not 0 < state.numel() <= MAX_TOKENS * len(state) * state.shape[-1] or not PLAIN.issuperset(map(type, tensors)):
        return None
    if {torch.float32} != set(map(DTYPE, tensors)) or not all(map(CONTIGUOUS, tensors)):
        return None
    key = (len(block.history), state.shape, *block[4:], *map(ADDRESS, parameters))
    program = _programs.get(key)
    if program is None:
        if len(_programs) == MAX_PROGRAMS:
            _programs.clear()
        program = _programs[key] = Program(block)
    return Session(program, block.history)


class Program:
    """The calls of a block: first the prefix, then a read for each branch, then the write."""

    def __init__(self, block: BlockArguments):
        streams, *tokens, width = block.history[0].shape
        number, branches, (sets, outputs, _) = math.prod(tokens), len(block.sets), block.queries.shape
        retrieved = [(outputs, *tokens, width)] * sets
        shapes: list[tuple[int, ...]] = [*retrieved, *[(outputs, *tokens)] * sets]
        shapes += [(len(block.history), sets, outputs, number), (len(block.history), streams, number)]
        shapes += [(*tokens, width)] * 2 * branches  # inputs and outputs of the branches
        shapes += [(n + 1, 2, *tokens) for n in range(branches)] if block.gates else []
        shapes += [(streams, *tokens, width)]
        sizes = [-(-math.prod(shape) // LINE) * LINE for shape in shapes]
        *starts, size = accumulate(sizes, initial=0)
        room = torch.empty(size)
        pairs = zip(starts, shapes, strict=True)
        found = [room.narrow(0, start, math.prod(shape)).view(shape) for start, shape in pairs]
        updates = found[2 * sets + 2 + branches :][:branches]
        with recorded() as jobs:
            self.kept = _run(block, found, updates)
        self.jobs = [0, *accumulate(8 * len(job) for job in jobs)]  # bytes from the first to each
        inputs = found[2 * sets + 2 :][:branches]
        self.inputs = [(tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in inputs]
        self.state = (found[-1].shape, found[-1].stride(), found[-1].storage_offset())
        words = np.concatenate(jobs)
        addresses = stream_addresses(list(block.history))
        self.history = np.array([np.flatnonzero(words == address)[0] for address in addresses])
        self.updates = [np.flatnonzero(words == update.data_ptr()) for update in updates]
        first = room.data_ptr()
        self.inside = ((words >= first) & (words < first + 4 * size)).astype(np.int64)
        self.words = words - first * self.inside
        for place in self.jobs[:-1]:
            memory = place // 8 + MEMORY
            self.words[memory], self.inside[memory] = 4 * size, 1
        self.size = size + max(-(-int(job[MEMORY + 1]) // 4) for job in jobs) + LINE


MEMORY = 2  # the place of the scratch memory's address in a job, before its size


def _run(block: BlockArguments, found: list[Tensor], updates: list[Tensor]) -> list[Tensor]:
    """Call the kernels of a block. -> the constants that they read"""
    sets, branches, route = len(block.queries), len(block.sets), (list(block.key), list(block.value))
    prefix(PrefixArguments(list(block.history), block.queries, *route, block.eps), found[: 2 * sets + 2])
    inputs, gated = found[2 * sets + 2 :], len(block.gates) > 0
    coefficients: Tensor | None = None
    constants = [torch.ones(i + 1, 1, *updates[0].shape[:-1]) for i in range(branches)]
    for i, (u, weight, eps) in enumerate(zip(block.sets, block.norms, block.norm_eps, strict=True)):
        left = inputs[2 * branches + i] if gated else torch.empty(0)
        gates = [tensor for gate in block.gates[u][: 2 + (i > 0)] for tensor in gate] if gated else []
        query = block.queries[u] if i > 0 else None
        live = (updates[:i], coefficients, None, query, gates, weight)
        read(ReadArguments(found[u], found[sets + u], None, *live, *route, 0, block.eps, eps), [inputs[i], left])
        coefficients = left if gated else constants[i]
    assert coefficients is not None
    write(WriteArguments(updates, coefficients, None, 0), [found[-1]])
    return constants


class Session:
    """One pass through a block, with the methods of a `Pathway`; it has no state but this."""

    def __init__(self, program: Program, history: Sequence[Tensor]):
        self.program, self.room = program, torch.empty(program.size)
        self.words = program.words + program.inside * self.room.data_ptr()
        self.words[program.history] = stream_addresses(list(history))
        self.address = self.words.ctypes.data
        self.kept: list[Tensor] = [*history]  # whose addresses are in use
        run_here(self.address)

    def read(self, state: None, i: int, norm: Any = None) -> tuple[Tensor, None]:
        """The input of branch i. -> (B,T,D)"""
        run_here(self.address + self.program.jobs[i + 1])
        return self.room.as_strided(*self.program.inputs[i]), None

    def write(self, state: None, i: int, update: Tensor) -> None:
        """Take the output of branch i. (B,T,D)"""
        update = update.to(torch.float32)
        self.words[self.program.updates[i]] = update.data_ptr()
        self.kept.append(update)

    def close(self, state: None) -> Tensor:
        """H_b (J,B,T,D)"""
        run_here(self.address + self.program.jobs[-2])
        return self.room.as_strided(*self.program.state)

"""A block of few tokens without gradients, as in generation: its calls are prepared once.

For a few tokens, what Python does around a kernel takes longer than the kernel. So the calls of a block are recorded
once, with all addresses. Every pass through the block then has one buffer for its results: it replaces the addresses of
results, fills in those of the history and of the branch outputs as they come, and calls the kernels.
"""
# B batch  T tokens  D width  J stored streams  O output streams  R history  U query sets

from collections.abc import Sequence
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from dualres.ops import checks
from dualres.ops.arguments import BlockArguments, PrefixArguments, ReadArguments, WriteArguments
from dualres.ops.cpu.launch import MEMORY, MIN_TOKENS, recorded, run_here
from dualres.ops.cpu.live import write
from dualres.ops.cpu.prefix import prefix, stream_addresses
from dualres.ops.cpu.read import read
from dualres.ops.cpu.rows import LINE

MAX_TOKENS = 2 * MIN_TOKENS - 1  # with more, a kernel uses several threads
MAX_PROGRAMS = 1024
PLAIN = {Tensor, Parameter}
SHAPE, KIND, FLOAT32 = attrgetter("shape"), attrgetter("dtype", "is_cpu"), {(torch.float32, True)}
_programs: dict[tuple[Any, ...], "Program"] = {}


def session(block: BlockArguments) -> "Session | None":
    """A pass through a block; None if these tensors need the general way."""
    state, parameters = block.history[0], block.parameters()
    tensors = [*block.history, *parameters]
    if not 0 < state.numel() <= MAX_TOKENS * len(state) * state.shape[-1] or not PLAIN.issuperset(map(type, tensors)):
        return None
    if set(map(KIND, tensors)) != FLOAT32 or not all(map(Tensor.is_contiguous, tensors)):
        return None
    key = (*map(SHAPE, block.history), *block[4:], *map(Tensor.data_ptr, parameters))
    program = _programs.get(key)
    if program is None:
        if len(_programs) == MAX_PROGRAMS:
            _programs.clear()
        program = _programs[key] = Program(block)
    return Session(program, block.history)


class Calls:
    """Calls the kernels of a block, and remembers the tensors: first the prefix, then every read, then the write."""

    def __init__(self, block: BlockArguments):
        streams, *tokens, width = block.history[0].shape
        (sets, outputs, _), states, branches = block.queries.shape, len(block.history), len(block.sets)
        self.results: list[Tensor] = []
        retrieved = [self.new(outputs, *tokens, width) for _ in range(sets)]
        partition = [self.new(outputs, *tokens) for _ in range(sets)]
        found = [*retrieved, *partition, self.new(states, sets, outputs, *tokens), self.new(states, streams, *tokens)]
        self.updates = [torch.empty(*tokens, width, device="cpu", dtype=torch.float32) for _ in range(branches)]
        self.ones = [torch.ones(i + 1, 1, *tokens, device="cpu", dtype=torch.float32) for i in range(branches)]
        key, value = list(block.key), list(block.value)
        history = PrefixArguments(list(block.history), block.queries, key, value, block.eps)
        checks.prefix(*history[:4])
        prefix(history, found)
        self.inputs, coefficients = [], None
        for i, (u, weight, eps) in enumerate(zip(block.sets, block.norms, block.norm_eps, strict=True)):
            query = block.queries[u] if i > 0 else None
            gates = [tensor for gate in block.gates[u][: 2 + (i > 0)] for tensor in gate] if block.gates else []
            live, rest = (self.updates[:i], coefficients, None, query), (key, value, 0, block.eps, eps)
            arguments = ReadArguments(retrieved[u], partition[u], None, *live, gates, weight, *rest)
            checks.read(arguments)
            coefficients = self.new(i + 1, 2, *tokens) if block.gates else self.ones[i]
            self.inputs.append(self.new(*tokens, width))
            read(arguments, [self.inputs[i], coefficients])
        assert coefficients is not None, "a block has branches"
        self.state = self.new(streams, *tokens, width)
        write(WriteArguments(self.updates, coefficients, None, 0), [self.state])

    def new(self, *shape: int) -> Tensor:
        """A result."""
        self.results.append(torch.empty(shape, device="cpu", dtype=torch.float32))
        return self.results[-1]


class Program:
    """The calls of a block as jobs of `launch`, in one array of words; addresses of results are relative to a buffer.

    `inside` is 1 for these addresses. The jobs use the end of the buffer as their memory.
    """

    def __init__(self, block: BlockArguments):
        with recorded() as jobs:
            calls = Calls(block)
        words = np.concatenate(jobs)
        self.constants = calls.ones  # whose addresses are not relative
        self.starts = [0, *accumulate(8 * len(job) for job in jobs)]  # of each job, in bytes
        self.history = np.array([_places(words, address)[0] for address in stream_addresses(list(block.history))])
        self.updates = [_places(words, update.data_ptr()) for update in calls.updates]
        self.words, self.inside, self.size = words.copy(), np.zeros_like(words), 0
        views = {}
        for result in calls.results:
            address = result.data_ptr()
            own = (words >= address) & (words < address + result.nbytes)
            self.words[own] += 4 * self.size - address
            self.inside[own] = 1
            views[address] = (result.shape, result.stride(), self.size)
            self.size += -(-result.numel() // LINE) * LINE
        self.inputs, self.state = [views[h.data_ptr()] for h in calls.inputs], views[calls.state.data_ptr()]
        memory = [start // 8 + MEMORY for start in self.starts[:-1]]
        self.words[memory], self.inside[memory] = 4 * self.size, 1
        self.size += max(int(job[MEMORY + 1]) for job in jobs) // 4


def _places(words: Any, address: int) -> Any:
    """Where an address is."""
    return np.flatnonzero(words == address)


class Session:
    """One pass through a block. It takes the place of a `Pathway`, whose state it has itself."""

    def __init__(self, program: Program, history: Sequence[Tensor]):
        self.program, self.buffer = program, torch.empty((program.size,), device="cpu", dtype=torch.float32)
        self.words = program.words + program.inside * self.buffer.data_ptr()
        self.words[program.history] = stream_addresses(list(history))
        self.address = self.words.ctypes.data
        self.kept = [*history]  # tensors whose addresses are in use
        run_here(self.address)

    def read(self, state: None, i: int, norm: Any = None) -> tuple[Tensor, None]:
        """The input of branch i. -> (B,T,D)"""
        run_here(self.address + self.program.starts[i + 1])
        return self.buffer.as_strided(*self.program.inputs[i]), None

    def write(self, state: None, i: int, update: Tensor) -> None:
        """Take the output of branch i. (B,T,D)"""
        self.kept.append(update.to(torch.float32))
        self.words[self.program.updates[i]] = self.kept[-1].data_ptr()

    def close(self, state: None) -> Tensor:
        """H_b (J,B,T,D)"""
        run_here(self.address + self.program.starts[-2])
        return self.buffer.as_strided(*self.program.state)

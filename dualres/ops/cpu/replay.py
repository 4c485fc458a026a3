"""A block of few tokens without gradients, as in generation: its kernel calls are recorded once and replayed.

For a few tokens, Python's work around a kernel takes longer than the kernel. So the calls of a block are recorded once,
with all addresses. Every pass through the block then allocates one buffer for its results, replaces the addresses of
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
from dualres.ops.cpu.launch import MEMORY, MIN_TOKENS, STEP, recorded, run_here
from dualres.ops.cpu.live import write
from dualres.ops.cpu.pointers import LINE
from dualres.ops.cpu.prefix import prefix, stream_addresses
from dualres.ops.cpu.read import read

MAX_TOKENS = 2 * MIN_TOKENS - 1  # with more, a kernel uses several threads
MAX_RECORDINGS = 1024
PLAIN, OWNED = {Tensor, Parameter}, {Parameter}
SHAPE, DTYPE, IS_CPU, FLOAT32 = attrgetter("shape"), attrgetter("dtype"), attrgetter("is_cpu"), {torch.float32}
_recordings: dict[tuple[Any, ...], "Recording"] = {}


def replay(block: BlockArguments) -> "Replay | None":
    """A pass through a block; None if these tensors need the regular path."""
    history, state, parameters = block.history, block.history[0], block.parameters()
    if not 0 < state.numel() <= MAX_TOKENS * len(state) * state.shape[-1] or not _ready(history):
        return None
    if not OWNED.issuperset(map(type, parameters)) or set(map(DTYPE, parameters)) != FLOAT32:
        return None  # a temporary tensor would have another address every time
    key = (*map(SHAPE, history), *map(id, parameters), *map(Tensor.data_ptr, parameters), *block[4:])
    recording = _recordings.get(key)
    if recording is None:
        if not _ready(parameters):
            return None
        recording = Recording(block)
        if len(_recordings) >= MAX_RECORDINGS:
            _recordings.clear()
        _recordings[key] = recording
    return Replay(recording, [*history, *parameters])


def _ready(tensors: Sequence[Tensor]) -> bool:
    """Whether kernels can take these tensors as they are."""
    plain = PLAIN.issuperset(map(type, tensors)) and all(map(Tensor.is_contiguous, tensors))
    return plain and all(map(IS_CPU, tensors)) and set(map(DTYPE, tensors)) == FLOAT32


def _new(*shape: int) -> Tensor:
    return torch.empty(shape, device="cpu", dtype=torch.float32)


class Calls:
    """Calls the kernels of a block and keeps their tensors: first the prefix, then every read, then the write.

    The history and the updates are placeholders.
    """

    def __init__(self, block: BlockArguments):
        checks.prefix(block.history, block.queries, block.key, block.value)
        streams, *tokens, width = block.history[0].shape
        (sets, outputs, _), states, branches = block.queries.shape, len(block.history), len(block.sets)
        self.results: list[Tensor] = []
        retrieved = [self.result(outputs, *tokens, width) for _ in range(sets)]
        partition = [self.result(outputs, *tokens) for _ in range(sets)]
        logits, norms = self.result(states, sets, outputs, *tokens), self.result(states, streams, *tokens)
        self.history = [_new(streams, *tokens, width) for _ in range(states)]
        self.updates = [_new(*tokens, width) for _ in range(branches)]
        self.ones = [_new(i + 1, 1, *tokens).fill_(1) for i in range(branches)]
        key, value = list(block.key), list(block.value)
        arguments = PrefixArguments(self.history, block.queries, key, value, block.eps)
        prefix(arguments, [*retrieved, *partition, logits, norms])
        self.inputs: list[Tensor] = []
        coefficients: Tensor | None = None
        for i, (u, weight, eps) in enumerate(zip(block.sets, block.norms, block.norm_eps, strict=True)):
            query = block.queries[u] if i > 0 else None
            gates = [tensor for gate in block.gates[u][: 2 + (i > 0)] for tensor in gate] if block.gates else []
            live: Any = (self.updates[:i], coefficients, None, query, gates, weight, key, value, 0, block.eps, eps)
            read_arguments = ReadArguments(retrieved[u], partition[u], None, *live)
            checks.read(read_arguments)
            coefficients = self.result(i + 1, 2, *tokens) if block.gates else self.ones[i]
            self.inputs.append(self.result(*tokens, width))
            read(read_arguments, [self.inputs[i], coefficients])
        assert coefficients is not None, "a block has branches"
        self.state = self.result(streams, *tokens, width)
        write(WriteArguments(self.updates, coefficients, None, 0), [self.state])

    def result(self, *shape: int) -> Tensor:
        self.results.append(_new(*shape))
        return self.results[-1]


class Recording:
    """The calls of a block as jobs of `launch`, in one array of words; addresses of results are relative to a buffer.

    `is_relative` is 1 for these addresses. The jobs use the end of the buffer as their memory.
    """

    def __init__(self, block: BlockArguments):
        with recorded() as jobs:
            calls = Calls(block)
        words = np.concatenate(jobs)
        self.constants = calls.ones  # whose addresses are not relative
        self.starts = [0, *accumulate(8 * len(job) for job in jobs)]  # of each job, in bytes
        self.history = np.concatenate([_positions(words, address) for address in stream_addresses(calls.history)])
        self.updates = [_positions(words, update.data_ptr()) for update in calls.updates]
        self.words, self.is_relative, self.size = words.copy(), np.zeros_like(words), 0
        views = {}
        for result in calls.results:
            address = result.data_ptr()
            own = (words >= address) & (words < address + result.nbytes)
            self.words[own] += 4 * self.size - address
            self.is_relative[own] = 1
            views[address] = (result.shape, result.stride(), self.size)
            self.size += -(-result.nbytes // LINE) * LINE // 4
        self.inputs, self.state = [views[h.data_ptr()] for h in calls.inputs], views[calls.state.data_ptr()]
        memory = [start // 8 + MEMORY for start in self.starts[:-1]]
        self.words[memory], self.is_relative[memory] = 4 * self.size, 1
        self.size += max(int(job[STEP]) for job in jobs) // 4


def _positions(words: Any, address: int) -> Any:
    return np.flatnonzero(words == address)


class Replay:
    """One pass through a block, which takes the place of a `Pathway`. It holds its own state."""

    def __init__(self, recording: Recording, tensors: Sequence[Tensor]):
        self.recording, self.buffer = recording, _new(recording.size)
        self.references = [*tensors]  # whose addresses are in use
        self.words = recording.words + recording.is_relative * self.buffer.data_ptr()
        self.address = self.words.ctypes.data

    def open(self, history: Sequence[Tensor]) -> None:
        """Retrieve from the history. R × (J,B,T,D)"""
        self.words[self.recording.history] = stream_addresses(list(history))
        run_here(self.address)

    def read(self, state: None, i: int, norm: Any = None) -> tuple[Tensor, None]:
        """The input of branch i. -> (B,T,D)"""
        run_here(self.address + self.recording.starts[i + 1])
        return self.buffer.as_strided(*self.recording.inputs[i]), None

    def write(self, state: None, i: int, update: Tensor) -> None:
        """Take the output of branch i. (B,T,D)"""
        if type(update) not in PLAIN or not update.is_cpu:
            update = _new(*update.shape).copy_(update)  # which waits for a collective
        self.references.append(update.to(torch.float32))
        self.words[self.recording.updates[i]] = self.references[-1].data_ptr()

    def close(self, state: None) -> Tensor:
        """H_b (J,B,T,D)"""
        run_here(self.address + self.recording.starts[-2])
        return self.buffer.as_strided(*self.recording.state)

    def carriers(self, state: None) -> tuple[Tensor, ...]:
        """None: there are no gradients."""
        return ()

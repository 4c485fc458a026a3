"""How many rows a model reads at once: chosen by memory, and halved where a GPU has too little after all."""
# B rows  T tokens  V vocabulary

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import TypeVar

import torch

from dualres.config.schema import ConfigError
from dualres.hub.open_model import TrainedModel

MOST_ROWS = 64
USEFUL_TOKENS = {"cuda": 2**17, "cpu": 2**13}  # in a batch; more of them run no faster
SHARE = {"cuda": 0.8, "cpu": 0.5}  # of the free memory: a CPU's is also for others, and to overdraw it is fatal
CHUNK_BYTES = {"cuda": 2**28, "cpu": 2**24}  # of float32 logits that a softmax looks at together; a CPU caches some
MACHINE = Path("/proc/meminfo")
GROUPS = tuple(  # what containers may use, in both versions of control groups: limit, use, and what the use is made of
    tuple(Path("/sys/fs/cgroup") / name for name in names)
    for names in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    )
)

Row = TypeVar("Row", bound=Sized)
Result = TypeVar("Result")


class Batch:
    """At most so many tokens at once, padding included. Less after a GPU's memory was not enough, for all that follows.

    Counted in tokens, so that more of short rows than of long ones run together.
    """

    def __init__(self, rows: int, context: int):
        self.tokens = rows * context

    def over(self, rows: Sequence[Row], work: Callable[[Sequence[Row]], Result]) -> Iterator[Result]:
        """What `work` makes of the rows, the longest of them first, batch by batch. One that does not fit is halved."""
        start = 0
        while start < len(rows):
            count = max(1, self.tokens // len(rows[start]))
            piece = rows[start : start + count]
            result = self._attempt(piece, work)
            if result is not None:
                yield result[0]
                start += len(piece)

    def _attempt(self, piece: Sequence[Row], work: Callable[[Sequence[Row]], Result]) -> tuple[Result] | None:
        try:
            return (work(piece),)
        except torch.OutOfMemoryError:
            if len(piece) == 1:
                raise
        # Here the error is gone, and with it the tensors that its traceback held.
        self.tokens = len(piece) // 2 * len(piece[0])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return None


def batch_for(subject: TrainedModel, rows: int | None = None) -> Batch:
    """Batches of `rows` rows of the subject's context, or of as many as suit its memory."""
    if rows is not None and rows < 1:
        raise ConfigError(f"a batch of {rows} rows is none: use 1 or more, or leave it out")
    return Batch(rows or batch_size(subject), subject.context)


def batch_size(subject: TrainedModel) -> int:
    """How many rows of the subject's context to read at once: as many as are useful, and fit by our estimate."""
    kind = kind_of(subject.device)
    useful = min(MOST_ROWS, USEFUL_TOKENS[kind] // subject.context)
    softmax = 3 * CHUNK_BYTES[kind]  # a chunk, its exponentials, and a spare
    free = SHARE[kind] * free_memory(subject.device) - softmax
    return max(1, min(useful, int(free // row_bytes(subject))))


def kind_of(device: torch.device) -> str:
    """Whose limits hold: those of a GPU, or of anything else."""
    return "cuda" if device.type == "cuda" else "cpu"


def row_bytes(subject: TrainedModel) -> int:
    """An estimate of what a row of `context` tokens needs, beside the weights and a chunk of the softmax.

    Numbers per token, in the model's dtype: the logits, V; states, 2 of the width in each layer (DAR keeps two streams
    of every block) and 8 in the layer at work; its feed-forward, 4 · ffn; and attention scores, heads · context.
    """
    config, context = subject.network.config, subject.context

    def size(*keys: str) -> int | None:
        return next((found for key in keys if (found := getattr(config, key, None))), None)

    width = size("hidden_size", "width") or subject.network.get_input_embeddings().weight.shape[-1]
    layers = size("num_hidden_layers", "layers") or 1
    ffn = size("intermediate_size") or 4 * width
    heads = size("num_attention_heads", "heads") or 1
    per_token = subject.vocab_size + (2 * layers + 8) * width + 4 * ffn + heads * context
    return per_token * context * torch.finfo(subject.dtype).bits // 8


def free_memory(device: torch.device) -> int:
    """Bytes that a device still has. A CPU's are the machine's or, where that is less, those of the control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, KeyError):  # no Linux
        free.append(_numbers(MACHINE)["MemAvailable"] * 1024)
    for limit, used, parts in GROUPS:
        with contextlib.suppress(OSError, ValueError, KeyError):  # no group of this kind, or no limit
            cached = _numbers(parts)["inactive_file"]  # counts as used, and is given back when asked for
            free.append(int(limit.read_text()) - int(used.read_text()) + cached)
    return min(free)


def _numbers(path: Path) -> dict[str, int]:
    """Lines such as `MemFree: 12 kB`."""
    return {words[0].rstrip(":"): int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}

"""How many rows a model reads at once: chosen by memory, and halved when a GPU runs out of it."""
# B rows  T tokens  V vocabulary

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import TypeVar

import torch

from dualres.hub.open_model import TrainedModel

MOST_ROWS = 64
USEFUL_TOKENS = {"cuda": 2**17, "cpu": 2**13}  # per batch; more are no faster
MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of the free memory; a CPU's is shared, and running out of it is fatal
CHUNK_BYTES = {"cuda": 2**28, "cpu": 2**24}  # of float32 logits per softmax; on a CPU, about a cache's size
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # limit, usage and statistics of a container, in versions 2 and 1 of control groups
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)

Item = TypeVar("Item", bound=Sized)
Result = TypeVar("Result")


class Batch:
    """A token budget per batch, padding included. It shrinks for good when GPU memory runs out.

    In tokens, so that more short rows than long ones share a batch.
    """

    def __init__(self, rows: int, context: int):
        self.tokens = rows * context

    def over(self, rows: Sequence[Item], work: Callable[[Sequence[Item]], Result]) -> Iterator[Result]:
        """`work` on each batch of the rows, which are sorted by falling length."""
        start = 0

        def work_on_next(count: int) -> Result:
            return work(rows[start : start + count])

        while start < len(rows):
            count = min(len(rows) - start, max(1, self.tokens // len(rows[start])))
            fitting, result = halved_until_it_fits(count, work_on_next)
            if fitting < count:
                self.tokens = fitting * len(rows[start])
            yield result
            start += fitting


def halved_until_it_fits(rows: int, work: Callable[[int], Result]) -> tuple[int, Result]:
    """`work` on so many rows, or on half as many whenever GPU memory runs out; how many it was, and the result."""
    while True:
        try:
            return rows, work(rows)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2  # outside of `except`, whose traceback keeps the tensors alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def batch_for(model: TrainedModel, rows: int | None = None) -> Batch:
    """Batches of `rows` rows of the model's context, or of as many as are useful and, by our estimate, fit."""
    if rows is None:
        kind = kind_of(model.device)
        useful = min(MOST_ROWS, USEFUL_TOKENS[kind] // model.context)
        softmax = 3 * CHUNK_BYTES[kind]  # a chunk, its exponentials, and a spare
        free = MEMORY_SHARE[kind] * free_memory(model.device) - softmax
        rows = max(1, min(useful, int(free // row_bytes(model))))
    return Batch(rows, model.context)


def kind_of(device: torch.device) -> str:
    """The key of the limits above."""
    return "cuda" if device.type == "cuda" else "cpu"


def row_bytes(model: TrainedModel) -> int:
    """An estimate of the memory for a row of `context` tokens, without the weights and the softmax.

    Elements per token, in the model's dtype: logits, V; states, 2 · width per layer (DAR has two streams per block) and
    8 · width in the active layer; its feed-forward, 4 · ffn; attention scores, heads · context.
    """
    config, context = model.network.config, model.context

    def size(*keys: str) -> int | None:
        return next((found for key in keys if (found := getattr(config, key, None))), None)

    width = size("hidden_size", "width") or model.network.get_input_embeddings().weight.shape[-1]
    layers = size("num_hidden_layers", "layers") or 1
    ffn = size("intermediate_size") or 4 * width
    heads = size("num_attention_heads", "heads") or 1
    per_token = model.vocab_size + (2 * layers + 8) * width + 4 * ffn + heads * context
    return per_token * context * torch.finfo(model.dtype).bits // 8


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of the machine or the control group, whichever has less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError, ValueError, KeyError):  # not Linux
        free.append(_numbers(MEMINFO)["MemAvailable"] * 1024)
    for limit, used, statistics in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):  # no control group of this version, or no limit
            reclaimable = _numbers(CGROUP / statistics)["inactive_file"]  # counted as used
            free.append(int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()) + reclaimable)
    return min(free)


def _numbers(path: Path) -> dict[str, int]:
    """Of lines such as `MemFree: 12 kB`."""
    return {words[0].rstrip(":"): int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}

"""Evaluation batch size: chosen from free memory, halved on GPU out-of-memory."""
# B rows  T tokens  V vocabulary

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import TypeVar

import torch

from dualres.hub.open_model import TrainedModel
from dualres.train.device import free_memory

MAX_ROWS = 64
USEFUL_TOKENS = {"cuda": 2**17, "cpu": 2**13}  # per batch; larger batches are not faster
MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of free memory; host memory is shared, and running out of it is fatal
CHUNK_BYTES = {"cuda": 2**28, "cpu": 2**24}  # of float32 logits per softmax; on a CPU, about the cache size

Item = TypeVar("Item", bound=Sized)
Result = TypeVar("Result")


class Batch:
    """A token budget per batch, including padding; permanently reduced after an out-of-memory error.

    It counts tokens, so that a batch holds more short rows than long ones.
    """

    def __init__(self, rows: int, context: int):
        self.tokens = rows * context

    def map(self, rows: Sequence[Item], work: Callable[[Sequence[Item]], Result]) -> Iterator[Result]:
        """Call `work` on batches of the rows, which must be sorted by decreasing length."""
        start = 0

        def work_on_next(count: int) -> Result:
            return work(rows[start : start + count])

        while start < len(rows):
            count = min(len(rows) - start, max(1, self.tokens // len(rows[start])))
            used, result = run_halving(count, work_on_next)
            if used < count:
                self.tokens = used * len(rows[start])
            yield result
            start += used


def run_halving(rows: int, work: Callable[[int], Result]) -> tuple[int, Result]:
    """Call `work(rows)`, halving `rows` on GPU out-of-memory. -> the number of rows used, and the result"""
    while True:
        try:
            return rows, work(rows)
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows //= 2  # outside `except`: its traceback keeps the tensors alive
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def batch_for(model: TrainedModel, rows: int | None = None) -> Batch:
    """A batch of `rows` full contexts; by default, as many as are useful and fit according to our estimate."""
    if rows is None:
        kind = device_kind(model.device)
        useful = min(MAX_ROWS, USEFUL_TOKENS[kind] // model.context)
        softmax = 3 * CHUNK_BYTES[kind]  # a chunk, its exponentials, and a margin
        free = MEMORY_SHARE[kind] * free_memory(model.device) - softmax
        rows = max(1, min(useful, int(free // row_bytes(model))))
    return Batch(rows, model.context)


def device_kind(device: torch.device) -> str:
    """The key in the tables of limits above."""
    return "cuda" if device.type == "cuda" else "cpu"


def row_bytes(model: TrainedModel) -> int:
    """Estimate the memory of a row of `context` tokens, without weights and softmax.

    Elements per token, in the model's dtype: logits, V; states, 2 · width per layer (DAR has two streams per block) and
    8 · width in the active layer; its feed-forward, 4 · ffn; attention scores, heads · context.
    """
    config, context = model.network.config, model.context

    def size(*keys: str) -> int | None:
        return next((value for key in keys if (value := getattr(config, key, None))), None)

    width = size("hidden_size", "width") or model.network.get_input_embeddings().weight.shape[-1]
    layers = size("num_hidden_layers", "layers") or 1
    ffn = size("intermediate_size") or 4 * width
    heads = size("num_attention_heads", "heads") or 1
    per_token = model.vocab_size + (2 * layers + 8) * width + 4 * ffn + heads * context
    return per_token * context * torch.finfo(model.dtype).bits // 8

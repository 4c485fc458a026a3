"""Batches of packed sequences from memory-mapped shards, in an order that depends only on the seed.

The documents of a split form one long row of tokens. It is cut into windows of `context` tokens (each also reads the
next token, its last target), and the windows are reshuffled every epoch. So the n-th sequence of a run is the same for
every method, engine and number of ranks, and the loader's whole state is one number: how many sequences were read.
"""
# B batch  T tokens (the context)

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualres.data.shards import Index, Split
from dualres.util.errors import DataError


class TokenRow:
    """The tokens of one split as one row, across its shards."""

    def __init__(self, folder: Path, index: Index, split: Split):
        self.shards: list[NDArray[Any]] = []
        for shard in index.shards(split):
            self.shards.append(np.memmap(folder / shard.file, np.dtype(index.dtype).newbyteorder("<"), "r"))
        self.ends = np.cumsum([len(shard) for shard in self.shards])  # where each shard ends in the row
        self.length = int(self.ends[-1]) if self.shards else 0

    def read(self, start: int, count: int) -> NDArray[np.int64]:
        out = np.empty(count, np.int64)
        filled = 0
        number = int(np.searchsorted(self.ends, start, side="right"))
        while filled < count:
            shard = self.shards[number]
            offset = start + filled - (int(self.ends[number]) - len(shard))
            piece = shard[offset : offset + count - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            number += 1
        return out


class Loader:
    """Sequences by number, without limit; in text order if `seed` is None."""

    def __init__(self, folder: Path, index: Index, split: Split, context: int, seed: int | None):
        self.row, self.context, self.seed = TokenRow(folder, index, split), context, seed
        self.windows = (self.row.length - 1) // context
        if self.windows < 1:
            raise DataError(
                f"the {split} split of {folder} has {self.row.length:,} tokens, too few for a sequence of {context}: "
                "prepare more text, change --held-out, or use a smaller model.context"
            )

    def batch(self, first: int, rows: int) -> Tensor:
        """Sequences first … first+rows−1 of the run. -> (B,T+1)"""
        return torch.from_numpy(np.stack([self._sequence(number) for number in range(first, first + rows)]))

    def windows_within(self, tokens: int | None) -> int:
        """The number of whole windows in `tokens` tokens: at least one, at most (and for None) all."""
        return self.windows if tokens is None else min(self.windows, max(1, tokens // self.context))

    def _sequence(self, number: int) -> NDArray[np.int64]:
        epoch, place = divmod(number, self.windows)
        window = place if self.seed is None else shuffled(place, self.windows, self.seed, epoch)
        return self.row.read(window * self.context, self.context + 1)


def sum_over_windows(
    loader: Loader, count: int, rows: int, batch_loss: Callable[[Tensor], float], rank: int = 0, ranks: int = 1
) -> float:
    """The loss summed over this rank's share of the first `count` windows; the caller takes the mean.

    `batch_loss` returns the sum over the windows of a batch (B,T+1) of at most `rows`. All ranks take part in every
    round, since a sharded model is gathered by all of them together; windows past the end are not counted.
    """
    total = 0.0
    for start in range(0, count, rows * ranks):
        first = start + rank * rows
        size = min(rows, count - first)
        loss = batch_loss(loader.batch(min(first, count - 1), max(1, size)))
        total += loss if size > 0 else 0.0
    return total


def shuffled(place: int, size: int, seed: int, epoch: int) -> int:
    """The image of `place` under a permutation of range(size) that is computed, not stored.

    Four rounds of a Feistel network on the next even number of bits; results outside the range are permuted again.
    """
    half = ((size - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(4):
            mixed = hashlib.blake2b(f"{seed} {epoch} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "little") & mask)
        place = left << half | right
        if place < size:
            return place

"""The order of sequences: every window once in a pass, and the same whoever asks."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dualres.data.loader import Loader, shuffled
from dualres.data.prepare import Settings, prepare
from dualres.data.shards import Index, ShardWriter, dtype_for
from dualres.data.tokenizer import byte_tokenizer
from dualres.util.errors import DataError
from tests.data.corpus import DOCUMENTS, write

CONTEXT = 8
SHARDS = {  # sizes in tokens
    "one": [200],
    "edges within windows": [13, 1, 2, 50, 134],
    "edges at windows": [8, 64, 128],
    "windows over many": [3] * 66,
}


def packed(folder: Path, sizes: Sequence[int], vocab_size: int = 70_000) -> tuple[Path, Index]:
    """Shards whose row of tokens is 0, 1, 2, …"""
    shards, start = [], 0
    for number, size in enumerate(sizes):
        writer = ShardWriter(folder / f"train-{number:05d}.bin", dtype_for(vocab_size))
        writer.add(np.arange(start, start + size, dtype=np.uint32))
        shards.append(writer.close())
        start += size
    return folder, Index("", dtype_for(vocab_size), vocab_size, 0, "", tuple(s for s in shards if s), ())


def loader(folder: Path, sizes: Sequence[int], seed: int | None = 0, context: int = CONTEXT) -> Loader:
    return Loader(*packed(folder, sizes), "train", context, seed)


def one_pass(loader: Loader, number: int) -> Tensor:
    return loader.batch(number * loader.windows, loader.windows)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS)
def test_a_pass_has_every_window_once(tmp_path: Path, sizes: list[int], seed: int | None):
    loads = loader(tmp_path, sizes, seed)
    assert loads.windows == (sum(sizes) - 1) // CONTEXT
    wanted = torch.arange(loads.windows)[:, None] * CONTEXT + torch.arange(CONTEXT + 1)
    for number in (0, 1, 5):
        found = one_pass(loads, number)
        assert found.dtype == torch.int64
        assert torch.equal(found[found[:, 0].argsort()], wanted)


def test_targets_overlap_by_one_token(tmp_path: Path):
    sequences = loader(tmp_path, [200], None).batch(0, 24)
    assert torch.equal(sequences[:-1, -1], sequences[1:, 0])
    assert torch.equal(sequences[:, :-1].flatten(), torch.arange(24 * CONTEXT))


@pytest.mark.parametrize(("tokens", "windows"), [(8, 0), (9, 1), (16, 1), (17, 2)])
def test_a_window_needs_its_last_target(tmp_path: Path, tokens: int, windows: int):
    if windows == 0:
        with pytest.raises(DataError, match=f"train split of {tmp_path} has 8 tokens, too few for a sequence of 8"):
            loader(tmp_path, [tokens])
    else:
        assert loader(tmp_path, [tokens]).windows == windows


def test_an_empty_split(tmp_path: Path):
    with pytest.raises(DataError, match=f"validation split of {tmp_path} has 0 tokens"):
        Loader(*packed(tmp_path, [100]), "validation", CONTEXT, 0)


def test_the_order_is_the_seeds(tmp_path: Path):
    def order(seed: int | None, number: int) -> list[int]:
        return one_pass(loader(tmp_path, [1000], seed), number)[:, 0].tolist()

    assert order(3, 0) == order(3, 0)
    orders = [order(seed, number) for seed in (0, 1, 2**40) for number in (0, 1, 2)]
    orders.append(sorted(orders[0]))
    assert len({tuple(o) for o in orders}) == 10
    assert order(None, 0) == order(None, 3) == sorted(orders[0])


def test_shuffling_leaves_little_in_its_place():
    """Fixed points and neighbours that stay neighbours: about one each is what chance gives."""
    size = 10_000
    order = np.array([shuffled(place, size, 5, 0) for place in range(size)])
    assert (order == np.arange(size)).sum() < 8
    assert (np.diff(order) == 1).sum() < 8
    assert abs(np.corrcoef(order, np.arange(size))[0, 1]) < 0.05
    assert abs(order[: size // 2].mean() / size - 0.5) < 0.02


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65, 255, 256, 257, 1000, 4097])
def test_shuffled_is_a_permutation(size: int):
    for seed, epoch in ((0, 0), (0, 1), (2**63, 10**6)):
        assert sorted(shuffled(place, size, seed, epoch) for place in range(size)) == list(range(size))


def test_the_order_stays_what_it_was():
    """A run that goes on with a newer version must see the same sequences."""
    assert [shuffled(place, 1000, 7, 2) for place in range(5)] == [798, 594, 436, 176, 332]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_ranks_share_one_order(tmp_path: Path, ranks: int):
    """Twelve sequences a step in micro-batches: rank r of W takes micro-batches r, r + W, …"""
    wanted = loader(tmp_path, [130, 70]).batch(0, 60)  # more than two passes of 24
    loads = [loader(tmp_path, [130, 70]) for _ in range(ranks)]
    for micro_batch in (size for size in (1, 2, 3, 4, 6, 12) if 12 % (size * ranks) == 0):
        found = torch.empty_like(wanted)
        for step in range(5):
            for number in range(12 // micro_batch):
                first = step * 12 + number * micro_batch
                found[first : first + micro_batch] = loads[number % ranks].batch(first, micro_batch)
        assert torch.equal(found, wanted)


def test_the_position_is_a_number(tmp_path: Path):
    """A loader that goes on from sequence 1,234,567,890 has read nothing before it."""
    far = 1_234_567_890
    first, second = loader(tmp_path, [200]), loader(tmp_path, [50, 150])
    assert torch.equal(first.batch(far, 30)[7:], second.batch(far + 7, 23))


def test_documents_are_packed(tmp_path: Path):
    """In the order of the source, each followed by the end of a text, and cut into windows."""
    source = write(tmp_path / "a.jsonl", DOCUMENTS)
    index = prepare(Settings(str(source), "bytes", held_out=0, shard_tokens=30_000), tmp_path / "out")
    assert len(index.train) > 2
    sequences = Loader(tmp_path / "out", index, "train", 100, None)
    row = sequences.batch(0, sequences.windows)[:, :-1].flatten().tolist()
    tokenizer = byte_tokenizer()
    wanted = [token for text in DOCUMENTS for token in (*tokenizer.encode(text), tokenizer.end_of_text)]
    assert row == wanted[: len(row)]
    assert len(wanted) - len(row) <= 100


def test_shards_are_mapped_not_read(tmp_path: Path):
    loads = loader(tmp_path, [100, 100])
    assert all(isinstance(shard, np.memmap) and shard.mode == "r" for shard in loads.row.shards)


@pytest.mark.parametrize("vocab_size", [300, 70_000])
def test_both_types_of_tokens(tmp_path: Path, vocab_size: int):
    loads = Loader(*packed(tmp_path, [299], vocab_size), "train", 99, None)
    assert loads.batch(2, 1).tolist() == [list(range(198, 298))]

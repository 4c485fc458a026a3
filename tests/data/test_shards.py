"""Shards that are not what the index says are refused, by name."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from dualres.data import shards
from dualres.data.prepare import Settings, prepare
from dualres.data.shards import Index, ShardWriter, read_index, read_tokenizer, verify
from dualres.data.tokenizer import byte_tokenizer, train_bpe
from dualres.util.errors import DataError
from tests.data.corpus import DOCUMENTS, write

SHARD = "train-00001.bin"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    source = write(folder / "a.jsonl", DOCUMENTS * 3)
    prepare(Settings(str(source), "bpe:300", held_out=0.3, shard_tokens=20_000), folder / "out")
    return folder / "out"


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def test_the_index_says_what_the_files_hold(folder: Path):
    index = read_index(folder)
    tokenizer = read_tokenizer(folder, index)
    assert (index.vocab_size, index.end_of_text, index.dtype) == (300, 299, "uint16")
    assert len(index.train) > 2
    assert len(index.validation) > 1
    texts = []
    for split in shards.SPLITS:
        for shard in index.shards(split):
            tokens = np.fromfile(folder / shard.file, "<u2")
            assert len(tokens) == shard.tokens
            assert tokens.max() == 299
            assert tokens[-1] == 299
            ends = np.flatnonzero(tokens == 299) + 1
            assert len(ends) == shard.documents
            texts += [tokenizer.decode(document) for document in np.split(tokens, ends)[:-1]]
        assert index.tokens(split) == sum(shard.tokens for shard in index.shards(split))
    assert sorted(texts) == sorted(DOCUMENTS * 3)
    verify(folder, index, 300)


def spoil(path: Path, start: int, data: bytes) -> None:
    """Write over a part of a file, which keeps its size."""
    with path.open("r+b") as file:
        file.seek(start)
        file.write(data)


def test_truncated(folder: Path):
    size = (folder / SHARD).stat().st_size
    os.truncate(folder / SHARD, size - 2)
    with pytest.raises(
        DataError, match=rf"{folder / SHARD} is truncated or altered \({size - 2:,} bytes, not {size:,}"
    ):
        read_index(folder)


def test_longer(folder: Path):
    with (folder / SHARD).open("ab") as file:
        file.write(b"\0")
    with pytest.raises(DataError, match=f"{folder / SHARD} is truncated or altered"):
        read_index(folder)


@pytest.mark.parametrize("name", [SHARD, "validation-00001.bin"])
def test_missing(folder: Path, name: str):
    (folder / name).unlink()
    with pytest.raises(DataError, match=f"{folder / name} is missing"):
        read_index(folder)


@pytest.mark.parametrize("place", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize("name", [SHARD, "validation-00001.bin"])
def test_altered_byte(folder: Path, name: str, place: int):
    index, tokens = read_index(folder), np.fromfile(folder / name, "<u2")
    spoil(folder / name, 2 * (place % len(tokens)), int(tokens[place] ^ 1).to_bytes(2, "little"))
    with pytest.raises(DataError, match=f"{folder / name} was altered"):
        verify(folder, index, 300)


@pytest.mark.parametrize("piece", [7, shards.READ], ids=["in pieces", "at once"])
def test_a_token_outside_the_vocabulary(folder: Path, monkeypatch: pytest.MonkeyPatch, piece: int):
    monkeypatch.setattr(shards, "READ", piece)
    index = read_index(folder)
    spoil(folder / SHARD, 2 * 1234, (300).to_bytes(2, "little"))
    with pytest.raises(
        DataError, match=f"{folder / SHARD} has token 300 at position 1234, outside model.vocab_size=300"
    ):
        verify(folder, index, 300)


def test_a_model_with_fewer_entries(folder: Path):
    """The files are as they were made, and still cannot be used."""
    with pytest.raises(DataError, match=f"{folder / 'train-00000.bin'} has token 299 .* model.vocab_size above 299"):
        verify(folder, read_index(folder), 299)


def test_another_tokenizer(folder: Path):
    train_bpe(iter(DOCUMENTS[:1]), 300).save(folder / shards.TOKENIZER)
    with pytest.raises(DataError, match=f"{folder / 'tokenizer.json'} is not the tokenizer that made these shards"):
        read_index(folder)


def test_another_end_of_text(folder: Path):
    index = json.loads((folder / shards.INDEX).read_text())
    (folder / shards.INDEX).write_text(json.dumps({**index, "end_of_text": 298}))
    with pytest.raises(DataError, match="is not the tokenizer that made these shards"):
        read_index(folder)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": "dualres tokens 0"}'])
def test_not_an_index(folder: Path, content: str):
    (folder / shards.INDEX).write_text(content)
    with pytest.raises(DataError, match=f"{folder / 'index.json'} is not an index of this version"):
        read_index(folder)


def test_no_index(tmp_path: Path):
    with pytest.raises(DataError, match=f"{tmp_path} has no index.json: create it with `dualres prepare SOURCE"):
        read_index(tmp_path)


def test_verified_files_are_not_read_again(folder: Path):
    index = read_index(folder)
    known = json.loads(json.dumps(verify(folder, index, 300)))
    assert set(known) == {shard.file for shard in (*index.train, *index.validation)}
    status = (folder / SHARD).stat()
    spoil(folder / SHARD, 0, b"\1\1")
    os.utime(folder / SHARD, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert verify(folder, index, 300, known) == known  # it looks unchanged, so it was not read
    os.utime(folder / SHARD, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(DataError, match=f"{folder / SHARD} was altered"):
        verify(folder, index, 300, known)


@pytest.mark.parametrize("ranks", [1, 2, 3, 20])
def test_processes_share_the_reading(folder: Path, ranks: int):
    index = read_index(folder)
    shares = [verify(folder, index, 300, share=(rank, ranks)) for rank in range(ranks)]
    assert sum(map(len, shares)) == len(index.train) + len(index.validation)
    assert {name: stamp for share in shares for name, stamp in share.items()} == verify(folder, index, 300)


def test_verified_for_another_vocabulary_is_not_verified(folder: Path):
    index = read_index(folder)
    known = verify(folder, index, 300)
    with pytest.raises(DataError, match="has token 299"):
        verify(folder, index, 299, known)


def test_verified_for_another_index_is_not_verified(folder: Path):
    index = read_index(folder)
    known = verify(folder, index, 300)
    other = dataclasses.replace(index, train=(dataclasses.replace(index.train[0], checksum="0"), *index.train[1:]))
    with pytest.raises(DataError, match=f"{folder / index.train[0].file} was altered"):
        verify(folder, other, 300, known)


@pytest.mark.parametrize("content", [None, "", "[1]", "{"])
def test_stamps_that_cannot_be_read(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "verified.json").write_text(content)
    assert shards.read_stamps(tmp_path / "verified.json") is None


def test_content_is_of_the_tokens(folder: Path):
    index = read_index(folder)
    assert dataclasses.replace(index, source="elsewhere").content == index.content
    moved = dataclasses.replace(index, train=index.train[:-1], validation=(index.train[-1], *index.validation))
    assert moved.content != index.content
    assert dataclasses.replace(index, train=index.train[::-1]).content != index.content


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, "uint16"), (65_536, "uint16"), (65_537, "uint32"), (131_072, "uint32")]
)
def test_the_smallest_type(tmp_path: Path, vocab_size: int, dtype: str):
    assert shards.dtype_for(vocab_size) == dtype
    writer = ShardWriter(tmp_path / "train-00000.bin", dtype)
    tokens = np.array([0, 1, vocab_size - 1], np.uint32)
    writer.add(tokens)
    writer.add(tokens[::-1])
    shard = writer.close()
    assert shard is not None
    assert (shard.tokens, shard.documents) == (6, 2)
    found = np.fromfile(tmp_path / shard.file, np.dtype(dtype).newbyteorder("<"))
    assert found.tolist() == [0, 1, vocab_size - 1, vocab_size - 1, 1, 0]
    index = Index("", shards.dtype_for(vocab_size), vocab_size, 0, "", (shard,), ())
    verify(tmp_path, index, vocab_size)
    with pytest.raises(DataError, match=f"has token {vocab_size - 1} at position 2"):
        verify(tmp_path, index, vocab_size - 1)


def test_a_shard_is_there_when_it_is_whole(tmp_path: Path):
    writer = ShardWriter(tmp_path / "a.bin", "uint16")
    writer.add(np.array(byte_tokenizer().encode("text"), np.uint32))
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin.partial"]
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]
    assert ShardWriter(tmp_path / "b.bin", "uint16").close() is None
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]

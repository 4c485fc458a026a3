"""Preparing: the same shards whatever the format, the split, progress, bounded memory."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import models

from dualres.cli import main
from dualres.data.prepare import Settings, is_held_out, prepare
from dualres.data.shards import SPLITS, read_index, verify
from dualres.data.tokenizer import train_bpe
from tests.data.corpus import (
    DOCUMENTS,
    SUFFIXES,
    files,
    memory_of_prepare,
    run,
    settings,
    texts,
    write,
)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_gives_the_same_shards(tmp_path: Path, suffix: str):
    sources = [write(tmp_path / f"corpus{s}", DOCUMENTS) for s in (".jsonl", suffix)]
    found = [prepare(settings(source), tmp_path / f"out{number}") for number, source in enumerate(sources)]
    assert found[0].content == found[1].content
    assert found[0].fingerprint == found[1].fingerprint


def test_documents_keep_their_order(folder: Path, whole: Path):
    for split in SPLITS:
        assert texts(whole, split) == [d for d in DOCUMENTS if is_held_out(d, 0.3) == (split == "validation")]
    verify(whole, read_index(whole), 300)


TOKENIZERS = {"bytes": 257, "bpe:300": 300, "tokenizer.json": 400}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizers(tmp_path: Path, folder: Path, name: str):
    train_bpe(iter(DOCUMENTS), 400).save(tmp_path / "tokenizer.json")
    chosen = str(tmp_path / name) if name == "tokenizer.json" else name
    index = prepare(settings(folder, tokenizer=chosen, held_out=0), tmp_path / "out")
    assert index.vocab_size == TOKENIZERS[name]
    assert texts(tmp_path / "out", "train") == DOCUMENTS


def test_the_held_out_split_is_of_the_texts(tmp_path: Path):
    """Neither the order of files nor the size of shards moves a document to the other side; copies stay together."""
    many = [f"text {number}" for number in range(400)]
    for name, order in {"forward": many, "backward": many[::-1], "twice": many * 2}.items():
        (tmp_path / name).mkdir()
        half = len(order) // 2
        write(tmp_path / name / "a.jsonl", order[:half])
        write(tmp_path / name / "b.parquet", order[half:])
        for size in (300, 10**6):
            prepare(settings(tmp_path / name, tokenizer="bytes", shard_tokens=size), tmp_path / f"{name} {size}")
            held_out = texts(tmp_path / f"{name} {size}", "validation")
            assert held_out == [text for text in order if is_held_out(text, 0.3)]
    assert 80 < sum(is_held_out(text, 0.3) for text in many) < 160


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.999])
def test_the_share_that_is_held_out(share: float):
    count = 20_000
    found = sum(is_held_out(f"{number}", share) for number in range(count))
    assert abs(found - share * count) <= 4 * (count * share * (1 - share)) ** 0.5


def test_a_larger_share_holds_out_the_same_and_more():
    small, large = ({n for n in range(1000) if is_held_out(f"{n} é", share)} for share in (0.02, 0.1))
    assert small < large
    assert sorted(small)[:5] == [51, 148, 158, 244, 273]  # a newer version must not train on what an older one held out


def test_the_fraction_of_plain_files_counts_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before a file is finished, its markup is not counted. The tokenizer is trained on an unknown share."""
    monkeypatch.setattr("dualres.data.prepare.BATCH_CHARACTERS", 1)
    (tmp_path / "source").mkdir()
    rows = [json.dumps({"text": "ä" * 10}, ensure_ascii=False) + "\n"] * 2  # 22 + 12 bytes
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / "source" / name).write_text("".join(rows))
    shown: list[tuple[str, float | None]] = []
    wanted = Settings(str(tmp_path / "source"), "bpe:300", held_out=0)
    prepare(wanted, tmp_path / "out", lambda text, fraction=None: shown.append((text, fraction)))
    size = (tmp_path / "source" / "a.jsonl").stat().st_size
    counted = [0, 20, 40, size + 20, size + 40]
    assert [fraction for text, fraction in shown if text.startswith("tokenizing")] == [n / (2 * size) for n in counted]
    assert {fraction for text, fraction in shown if text.startswith("training")} == {None}


def test_progress_begins_at_zero_and_ends_with_everything(
    tmp_path: Path, folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    """And how documents are batched changes nothing."""
    monkeypatch.setattr("dualres.data.prepare.BATCH_CHARACTERS", 1)
    monkeypatch.setattr("dualres.data.prepare.short", str)  # all digits
    clock = iter(range(100))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    shown: list[str] = []
    index = prepare(settings(folder), tmp_path / "out", lambda text, fraction=None: shown.append(text))
    assert files(tmp_path / "out") == files(whole)
    stages = ("training the tokenizer", "tokenizing")
    training, tokenizing = ([text for text in shown if text.startswith(f"{stage}: ")] for stage in stages)
    assert shown == training + tokenizing
    places = [f"{name} ({i}/4)" for i, (name, count) in enumerate(PARTS.items(), 1) for _ in range(count)]
    for name, stage in zip(stages, (training, tokenizing), strict=True):
        assert stage[0] == f"{name}: a.jsonl.gz (1/4)  0 documents  0 tokens  0.0 characters/s  0:01"
        assert [text.split(": ")[1].split("  ")[:2] for text in stage[1:]] == [
            [place, f"{count} documents"] for count, place in enumerate(places, 1)
        ]
        assert stage[-1].split("  ")[3] == f"{sum(map(len, DOCUMENTS)) / len(stage)} characters/s"
    assert {text.split("  ")[2] for text in training} == {"0 tokens"}
    assert tokenizing[-1].split("  ")[2] == f"{index.tokens('train') + index.tokens('validation')} tokens"


PARTS = {"a.jsonl.gz": 3, "b.txt": 0, "c.parquet": 2, "d.txt.zst": 2}  # documents


def test_the_command_shows_what_it_does(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["prepare", str(folder), str(tmp_path / "out"), "--tokenizer", "bpe:300", "--held-out", "0.3"]) == 0
    out, err = capsys.readouterr()
    first = "training the tokenizer: a.jsonl.gz (1/4)  0 documents  0 tokens  0 characters/s  0:00"
    assert err.splitlines()[0] == first
    index = read_index(tmp_path / "out")
    for split in SPLITS:
        documents = len(texts(tmp_path / "out", split))
        assert f"{split:10}  {index.tokens(split):>15,} tokens  {documents:>11,} documents\n" in out
    assert f"vocabulary  300; wrote {tmp_path / 'out'}" in out


BIG = 160 * 2**20  # bytes of text


def big_text(path: Path) -> None:
    """Without blank lines."""
    with path.open("w") as file:
        for number in range(BIG // 2**20):
            file.write(f"line {number} {'text ' * 70}\n" * (2**20 // 360))


def big_parquet(path: Path) -> None:
    """One group of rows that no dictionary or compression makes small."""
    rows = pyarrow.array([f"{number} a row of text " * 250 for number in range(64)])
    table = pyarrow.table({"text": rows.take(pyarrow.array(np.arange(BIG // 4200) % 64))})
    pyarrow.parquet.write_table(table, path, row_group_size=len(table), use_dictionary=False, compression="none")


@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param("a.txt", big_text, id="txt", marks=pytest.mark.slow),
        pytest.param("a.parquet", big_parquet, id="parquet"),
    ],
)
def test_memory_is_bounded(tmp_path: Path, name: str, make: Callable[[Path], None]):
    """With a tokenizer that is fast: a document is one token."""
    backend = tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    backend.add_special_tokens(["</s>"])
    backend.save(str(tmp_path / "t.json"))
    make(tmp_path / name)
    assert (tmp_path / name).stat().st_size > 0.95 * BIG
    asked = settings(tmp_path / name, tokenizer=str(tmp_path / "t.json"))
    assert run(memory_of_prepare, asked, tmp_path / "out", tmp_path / "answer") == 0
    assert int((tmp_path / "answer").read_text()) < BIG / 2

"""Preparing: the same shards whatever the format and however often it was killed, in bounded memory."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from tokenizers import models

from dualres.cli import main
from dualres.data.errors import DataError
from dualres.data.prepare import Report, Settings, is_held_out, prepare
from dualres.data.shards import SPLITS, read_index, read_tokenizer, verify
from dualres.data.tokenizer import train_bpe
from tests.data.corpus import (
    DOCUMENTS,
    SUFFIXES,
    document,
    files,
    memory_of_prepare,
    prepare_and_die,
    run,
    write,
    zstandard,
)


def texts(folder: Path, split: str) -> list[str]:
    """The documents of a split, in order."""
    index = read_index(folder)
    tokenizer = read_tokenizer(folder, index)
    found = []
    for shard in index.train if split == "train" else index.validation:
        tokens = np.fromfile(folder / shard.file, np.dtype(index.dtype).newbyteorder("<"))
        ends = np.flatnonzero(tokens == index.end_of_text) + 1
        found += [tokenizer.decode(text) for text in np.split(tokens, ends)[:-1]]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several formats; some end where a chunk ends, one is empty, some texts are empty."""
    folder = tmp_path_factory.mktemp("source")
    write(folder / "a.jsonl.gz", [document(0), "", document(1), document(2), ""])
    write(folder / "b.txt", [])
    write(folder / "c.parquet", [document(3), document(4)])
    write(folder / "d.txt.zst", [document(5), document(6)])
    return folder


def settings(folder: Path, **changes: Any) -> Settings:
    """A chunk has three documents."""
    return Settings(
        **{"source": str(folder), "tokenizer": "bpe:300", "held_out": 0.3, "shard_tokens": 12_000, **changes}
    )


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an uninterrupted preparation writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    index = prepare(settings(folder), out)
    assert [len(index.train), len(index.validation)] == [2, 2]
    assert json.loads((out / "progress.json").read_text())["chunks"] == 3
    return out


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


def test_killed_before_every_change_of_the_folder(tmp_path: Path, folder: Path, whole: Path):
    """And taken up again, it gives the same bytes."""
    wanted, stages = files(whole), set()
    for moment in itertools.count():
        out = tmp_path / str(moment)
        code = run(prepare_and_die, settings(folder), out, moment)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        stages.add(tuple(sorted(path.name for path in out.iterdir())))
        prepare(settings(folder), out)
        assert files(out) == wanted
    assert moment > 20
    assert len(stages) > 15
    assert files(out) == wanted


def test_killed_again_and_again(tmp_path: Path, folder: Path, whole: Path):
    """Each start comes a little further than the one before."""
    for kills in itertools.count():
        code = run(prepare_and_die, settings(folder), tmp_path / "out", 13)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        assert kills < 20
    assert kills > 2
    assert files(tmp_path / "out") == files(whole)


def test_the_command_is_killed(tmp_path: Path):
    """From outside, at any moment, as a scheduler does it."""
    source = write(tmp_path / "a.jsonl.zst", [document(number) for number in range(60)])
    arguments = ["prepare", str(source), str(tmp_path / "out"), "--tokenizer", "bpe:300", "--shard-tokens", "20000"]
    assert main([*arguments[:2], str(tmp_path / "whole"), *arguments[3:]]) == 0
    for shards in (1, 5):
        process = subprocess.Popen([sys.executable, "-m", "dualres", *arguments], stderr=subprocess.DEVNULL)
        while len(list((tmp_path / "out").glob("train-*.bin"))) < shards:
            assert process.poll() is None, "it ended before it was killed"
            time.sleep(0.001)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        assert not (tmp_path / "out" / "index.json").exists()
    assert main(arguments) == 0
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.fixture
def interrupted(tmp_path: Path, folder: Path) -> Path:
    """A folder with some chunks but not all, made from a copy of the source."""
    shutil.copytree(folder, tmp_path / "source")
    assert run(prepare_and_die, settings(tmp_path / "source"), tmp_path / "out", 16) == -signal.SIGKILL
    assert json.loads((tmp_path / "out" / "progress.json").read_text())["chunks"] == 1
    return tmp_path


def test_resumed_where_it_stopped(interrupted: Path, whole: Path):
    """What was done is not read again, but for the part that was begun."""
    before = {path.name: path.stat().st_mtime_ns for path in (interrupted / "out").glob("*00000.bin")}
    first: list[Report] = []
    prepare(settings(interrupted / "source"), interrupted / "out", first.append)
    assert {name: (interrupted / "out" / name).stat().st_mtime_ns for name in before} == before
    assert first[0].stage == "tokenizing"
    assert first[0].documents == 3
    assert first[0].characters == 0
    assert read_index(interrupted / "out").content == read_index(whole).content


OTHER_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "field": ({"field": "id"}, "field 'text' → 'id'"),
    "held out": ({"held_out": 0.2}, "held_out 0.3 → 0.2"),
    "shard size": ({"shard_tokens": 9_000}, "shard_tokens 12000 → 9000"),
    "tokenizer": ({"tokenizer": "bytes", "end_of_text": "x"}, "tokenizer 'bpe:300' → 'bytes', end_of_text None → 'x'"),
}


@pytest.mark.parametrize(("changes", "says"), OTHER_SETTINGS.values(), ids=OTHER_SETTINGS)
def test_other_settings_are_refused(interrupted: Path, changes: dict[str, Any], says: str):
    out = interrupted / "out"
    for _ in ("interrupted", "finished"):
        before = files(out)
        with pytest.raises(DataError) as raised:
            prepare(settings(interrupted / "source", **changes), out)
        assert str(raised.value).startswith(f"{out} was prepared from other settings ({says}")
        assert files(out) == before
        prepare(settings(interrupted / "source"), out)


def grow(source: Path) -> str:
    with (source / "d.txt.zst").open("ab") as file:
        file.write(zstandard(b"more"))
    return "d.txt.zst"


def shrink(source: Path) -> str:
    write(source / "a.jsonl.gz", [document(0), document(1), document(2)])
    return "a.jsonl.gz"


def remove(source: Path) -> str:
    (source / "c.parquet").unlink()
    return "c.parquet"


def add(source: Path) -> str:
    write(source / "aa.txt", ["x"])
    return "aa.txt"


@pytest.mark.parametrize("change", [grow, shrink, remove, add], ids=lambda change: change.__name__)
def test_a_source_that_changed_is_refused(interrupted: Path, change: Callable[[Path], str]):
    name = change(interrupted / "source")
    with pytest.raises(DataError, match=f"other files or sizes in the source: {name}"):
        prepare(settings(interrupted / "source"), interrupted / "out")


def test_a_tokenizer_that_changed_is_refused(tmp_path: Path, folder: Path):
    path = tmp_path / "t.json"
    train_bpe(iter(DOCUMENTS), 400).save(path)
    asked = settings(folder, tokenizer=str(path))
    assert run(prepare_and_die, asked, tmp_path / "out", 16) == -signal.SIGKILL
    before = (tmp_path / "out" / "tokenizer.json").read_bytes()
    train_bpe(iter(DOCUMENTS), 399).save(path)
    with pytest.raises(DataError, match=f"{path} is not the tokenizer that {tmp_path / 'out'} began with"):
        prepare(asked, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before


def test_a_stored_tokenizer_that_changed_is_refused(interrupted: Path):
    path = interrupted / "out" / "tokenizer.json"
    train_bpe(iter(DOCUMENTS), 299).save(path)
    with pytest.raises(DataError, match=f"{path} is not the tokenizer that {interrupted / 'out'} began with"):
        prepare(settings(interrupted / "source"), interrupted / "out")


def test_a_shard_that_was_lost_is_named(interrupted: Path):
    (interrupted / "out" / "train-00000.bin").unlink()
    for _ in ("first", "again"):
        with pytest.raises(DataError, match=f"{interrupted / 'out' / 'train-00000.bin'} is missing"):
            prepare(settings(interrupted / "source"), interrupted / "out")
    assert not (interrupted / "out" / "index.json").exists()


def test_settings_may_change_before_the_first_shard(tmp_path: Path, folder: Path, whole: Path):
    """A mistake in the first command does not spoil the folder: neither its tokenizer nor a shard stays."""
    first = settings(folder, tokenizer="bpe:290", held_out=0.9)
    for moment in itertools.count():
        out = tmp_path / str(moment)
        assert run(prepare_and_die, first, out, moment) == -signal.SIGKILL
        progress = out / "progress.json"
        if progress.exists() and json.loads(progress.read_text())["chunks"]:
            break
        prepare(settings(folder), out)
        assert files(out) == files(whole)
    assert moment > 10


def test_a_finished_folder_is_left_alone(tmp_path: Path, folder: Path, whole: Path):
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    (out / "train-of-thought.bin").touch()
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino, path.stat().st_size) for path in out.iterdir()}
    reports: list[Report] = []
    assert prepare(settings(folder), out, reports.append) == read_index(whole)
    after = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino, path.stat().st_size) for path in out.iterdir()}
    assert after == before
    assert reports == []


def test_a_folder_of_something_else_is_refused(tmp_path: Path, folder: Path):
    (tmp_path / "thesis.partial").touch()
    with pytest.raises(DataError, match=f"{tmp_path} is not empty and holds no preparation"):
        prepare(settings(folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.partial"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": {}, "train": [{}]}'])
def test_progress_that_cannot_be_read(tmp_path: Path, folder: Path, content: str):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(DataError, match=f"{tmp_path / 'progress.json'} cannot be read"):
        prepare(settings(folder), tmp_path)


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


NOTHING: dict[str, tuple[str, bytes]] = {
    "empty text": ("a.txt", b""),
    "empty gz": ("a.txt.gz", b""),
    "blank lines of json": ("a.jsonl", b"\n\n"),
    "empty texts": ("a.jsonl", b'{"text": ""}\n{"text": ""}'),
}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize(("name", "content"), NOTHING.values(), ids=NOTHING)
def test_a_source_without_documents(tmp_path: Path, name: str, content: bytes, tokenizer: str):
    (tmp_path / name).write_bytes(content)
    for _ in ("first", "again"):
        with pytest.raises(DataError, match=f"the source {tmp_path / name} has no documents to train on"):
            prepare(settings(tmp_path / name, tokenizer=tokenizer), tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"held_out": -0.1}, "--held-out -0.1 is no share"),
        ({"held_out": 1.0}, "--held-out 1.0 is no share"),
        ({"held_out": float("nan")}, "--held-out nan is no share"),
        ({"shard_tokens": 0}, "--shard-tokens 0 is not positive"),
        ({"tokenizer": "bpe:many"}, "--tokenizer bpe:many: write bpe:4096"),
        ({"tokenizer": "bpe:12"}, "a BPE of 12 entries has no room"),
        ({"tokenizer": "missing.json"}, "--tokenizer missing.json: use bytes"),
        ({"tokenizer": __file__}, "test_prepare.py is not a tokenizer.json"),
    ],
    ids=str,
)
def test_impossible_settings(tmp_path: Path, folder: Path, changes: dict[str, Any], says: str):
    with pytest.raises(DataError, match=says):
        prepare(settings(folder, **changes), tmp_path / "out")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("line", ["{", "{}", r'{"text": "\ud800"}'], ids=["json", "no field", "surrogate"])
def test_a_bad_line_is_one_line_and_exit_2(
    tmp_path: Path, line: str, tokenizer: str, capsys: pytest.CaptureFixture[str]
):
    path = write(tmp_path / "a.jsonl", DOCUMENTS)
    path.write_text(path.read_text() + "\n" + line)
    assert main(["prepare", str(path), str(tmp_path / "out"), "--tokenizer", tokenizer]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith(f"dualres: {path}, line 14 ")
    write(path, DOCUMENTS)
    assert main(["prepare", str(path), str(tmp_path / "out"), "--tokenizer", tokenizer]) == 0


def test_progress_begins_at_zero_and_ends_with_everything(
    tmp_path: Path, folder: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
):
    """And how documents are batched changes nothing."""
    monkeypatch.setattr("dualres.data.prepare.BATCH_CHARACTERS", 1)
    reports: list[Report] = []
    index = prepare(settings(folder), tmp_path / "out", reports.append)
    assert files(tmp_path / "out") == files(whole)
    training = [report for report in reports if report.stage == "training the tokenizer"]
    tokenizing = [report for report in reports if report.stage == "tokenizing"]
    assert reports == training + tokenizing
    for stage in (training, tokenizing):
        assert stage[0] == Report(stage[0].stage, "a.jsonl.gz", 0, 4, 0, 0, 0)
        assert [report.documents for report in stage] == list(range(8))
        assert [report.part for report in stage[1:]] == [name for name in PARTS for _ in range(PARTS[name])]
        assert [report.parts_done for report in stage[1:]] == [
            i for i, n in enumerate(PARTS.values()) for _ in range(n)
        ]
        assert stage[-1].characters == sum(map(len, DOCUMENTS))
    assert {report.tokens for report in training} == {0}
    assert tokenizing[-1].tokens == index.tokens("train") + index.tokens("validation")


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
    assert f"vocabulary  300; written to {tmp_path / 'out'}" in out


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


@pytest.mark.parametrize(("name", "make"), [("a.txt", big_text), ("a.parquet", big_parquet)], ids=["txt", "parquet"])
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

"""Preparing that was killed, whenever and however often, ends with the same bytes, or says why it may not go on."""

import itertools
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualres.cli import main
from dualres.data.prepare import prepare
from dualres.data.shards import read_index
from dualres.data.tokenizer import train_bpe
from dualres.util.errors import DataError
from tests.data.corpus import (
    DOCUMENTS,
    document,
    files,
    prepare_and_die,
    run,
    settings,
    write,
    zstandard,
)


@pytest.mark.slow
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


@pytest.mark.slow
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
    shown: list[str] = []
    prepare(settings(interrupted / "source"), interrupted / "out", lambda text, fraction=None: shown.append(text))
    assert {name: (interrupted / "out" / name).stat().st_mtime_ns for name in before} == before
    assert re.match(r"tokenizing: .*  3 documents  .* tokens  0 characters/s", shown[0])
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
        assert str(raised.value).startswith(f"{out} was prepared with different settings ({says}")
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
    with pytest.raises(DataError, match=f"files or sizes in the source have changed: {name}"):
        prepare(settings(interrupted / "source"), interrupted / "out")


def test_a_tokenizer_that_changed_is_refused(tmp_path: Path, folder: Path):
    path = tmp_path / "t.json"
    train_bpe(iter(DOCUMENTS), 400).save(path)
    asked = settings(folder, tokenizer=str(path))
    assert run(prepare_and_die, asked, tmp_path / "out", 16) == -signal.SIGKILL
    before = (tmp_path / "out" / "tokenizer.json").read_bytes()
    train_bpe(iter(DOCUMENTS), 399).save(path)
    with pytest.raises(DataError, match=f"{path} is not the tokenizer that {tmp_path / 'out'} started with"):
        prepare(asked, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == before


def test_a_stored_tokenizer_that_changed_is_refused(interrupted: Path):
    path = interrupted / "out" / "tokenizer.json"
    train_bpe(iter(DOCUMENTS), 299).save(path)
    with pytest.raises(DataError, match=f"{path} is not the tokenizer that {interrupted / 'out'} started with"):
        prepare(settings(interrupted / "source"), interrupted / "out")


def test_a_shard_that_was_lost_is_named(interrupted: Path):
    (interrupted / "out" / "train-00000.bin").unlink()
    for _ in ("first", "again"):
        with pytest.raises(DataError, match=f"{interrupted / 'out' / 'train-00000.bin'} is missing"):
            prepare(settings(interrupted / "source"), interrupted / "out")
    assert not (interrupted / "out" / "index.json").exists()


@pytest.mark.slow
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
    shown: list[str] = []
    assert prepare(settings(folder), out, lambda text, fraction=None: shown.append(text)) == read_index(whole)
    after = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino, path.stat().st_size) for path in out.iterdir()}
    assert after == before
    assert shown == []

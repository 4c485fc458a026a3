"""Preparing with something in the way: bad text or settings, another process, a full disk, a folder in use."""

import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from dualres.cli import main
from dualres.data.prepare import Settings, prepare
from dualres.util.errors import DataError
from tests.data.corpus import (
    DOCUMENTS,
    document,
    settings,
    write,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder / "a.jsonl", [document(number) for number in range(6)])
    return folder


def test_two_preparations_in_one_folder(source: Path, tmp_path: Path):
    refusals: list[str] = []

    def second(text: str, fraction: float | None = None) -> None:
        if not refusals:
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()

    def begin() -> None:
        try:
            prepare(Settings(str(source), "bytes"), tmp_path / "out")
        except DataError as error:
            refusals.append(str(error))

    prepare(Settings(str(source), "bytes"), tmp_path / "out", second)
    assert refusals == [f"another process is preparing {tmp_path / 'out'}: wait for it, or use a new folder"]
    begin()  # afterwards it finds all done
    assert len(refusals) == 1


def test_a_folder_inside_its_source(source: Path):
    with pytest.raises(DataError, match=rf"{source / 'tokens'} is inside its source {source}"):
        prepare(Settings(str(source), "bytes"), source / "tokens")
    assert not (source / "tokens").exists()


@pytest.mark.parametrize(
    ("limit", "name"), [pytest.param(1000, "tokenizer.json", marks=pytest.mark.slow), (20_000, "train-00000.bin")]
)
def test_a_full_disk_is_named(limit: int, name: str, source: Path, tmp_path: Path):
    """As on a full disk, a file that grows beyond the limit cannot be written; then there is room again."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "dualres", "prepare", str(source), str(out), "--tokenizer", "bytes"]
    full = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert full.returncode == 1
    assert full.stderr.splitlines()[-1] == (
        f"dualres: cannot read or write: [Errno 27] File too large: '{out / name}': free some space there and rerun "
        "the command"
    )
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    prepare(Settings(str(source), "bytes"), tmp_path / "whole")
    for path in (tmp_path / "whole").glob("*.bin"):
        assert (out / path.name).read_bytes() == path.read_bytes()


def test_a_folder_of_something_else_is_refused(tmp_path: Path, folder: Path):
    (tmp_path / "thesis.partial").touch()
    with pytest.raises(DataError, match=f"{tmp_path} is not empty and was not created by"):
        prepare(settings(folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.partial"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"settings": {}, "train": [{}]}'])
def test_progress_that_cannot_be_read(tmp_path: Path, folder: Path, content: str):
    (tmp_path / "progress.json").write_text(content)
    with pytest.raises(DataError, match=f"{tmp_path / 'progress.json'} cannot be read"):
        prepare(settings(folder), tmp_path)


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
        with pytest.raises(DataError, match=f"the source {tmp_path / name} has no documents for training"):
            prepare(settings(tmp_path / name, tokenizer=tokenizer), tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_a_split_that_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Without training documents there is nothing to use; without validation, training will not start."""
    (tmp_path / "a.txt").write_text("one document\n")
    given = ["prepare", str(tmp_path / "a.txt"), "--tokenizer", "bytes"]
    assert main([*given, str(tmp_path / "none"), "--held-out", "0.999999"]) == 2
    assert "were held out, none is left for training: use a smaller --held-out than 0.999999" in capsys.readouterr().err
    assert not (tmp_path / "none" / "index.json").exists()
    for _ in ("first", "again"):
        assert main([*given, str(tmp_path / "all"), "--held-out", "0"]) == 0
        err = capsys.readouterr().err
        assert "the validation split is empty, and `dualres train` needs one: prepare a new folder with a larger" in err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"held_out": -0.1}, "--held-out -0.1 is not a fraction"),
        ({"held_out": 1.0}, "--held-out 1.0 is not a fraction"),
        ({"held_out": float("nan")}, "--held-out nan is not a fraction"),
        ({"shard_tokens": 0}, "--shard-tokens 0 is not positive"),
        ({"tokenizer": "bpe:many"}, "--tokenizer bpe:many: use bpe:4096"),
        ({"tokenizer": "bpe:12"}, "bpe:12 has no room"),
        ({"tokenizer": "missing.json"}, "--tokenizer missing.json: use bytes"),
        ({"tokenizer": __file__}, "test_prepare_faults.py is not a tokenizer.json"),
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

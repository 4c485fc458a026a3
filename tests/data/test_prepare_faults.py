"""Preparing where something is in the way: another process, a full disk, a folder inside its source."""

import resource
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from dualres.data.errors import DataError
from dualres.data.prepare import Report, Settings, prepare
from tests.data.corpus import document, write


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    write(folder / "a.jsonl", [document(number) for number in range(6)])
    return folder


def test_two_preparations_in_one_folder(source: Path, tmp_path: Path):
    refusals: list[str] = []

    def second(report: Report) -> None:
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
    assert refusals == [f"another process prepares {tmp_path / 'out'}: wait for it, or use a new folder"]
    begin()  # afterwards it finds all done
    assert len(refusals) == 1


def test_a_finished_folder_is_not_touched(source: Path, tmp_path: Path):
    out = tmp_path / "out"
    prepare(Settings(str(source), "bytes"), out)
    before = {path: path.stat().st_mtime_ns for path in (out, *out.iterdir())}
    prepare(Settings(str(source), "bytes"), out)
    assert {path: path.stat().st_mtime_ns for path in (out, *out.iterdir())} == before


def test_a_folder_inside_its_source(source: Path):
    with pytest.raises(DataError, match=rf"{source / 'tokens'} lies inside its source {source}"):
        prepare(Settings(str(source), "bytes"), source / "tokens")
    assert not (source / "tokens").exists()


@pytest.mark.parametrize(("limit", "name"), [(1000, "tokenizer.json"), (20_000, "train-00000.bin")])
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
        f"dualres: cannot read or write: [Errno 27] File too large: '{out / name}': free space there and give the same "
        "command again"
    )
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    prepare(Settings(str(source), "bytes"), tmp_path / "whole")
    for path in (tmp_path / "whole").glob("*.bin"):
        assert (out / path.name).read_bytes() == path.read_bytes()

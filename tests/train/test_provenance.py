"""What a run records of its starts: commit, versions, machine and time, and nothing about people or places."""

import getpass
import json
import platform
import re
import subprocess
from pathlib import Path

import pytest
import torch

from dualres.train import provenance
from dualres.train.provenance import PROVENANCE, read_starts
from dualres.util.version import VERSION
from tests.train.tiny import Told, terminate, tiny_config, train_tiny

SHORT = tiny_config(train__tokens=8 * 4 * 32)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def test_a_start(whole: Path):
    [start] = read_starts(whole)
    assert (start.step, start.processes, start.threads) == (0, 1, torch.get_num_threads())
    versions = start.dualres, start.torch, start.python
    assert versions == (VERSION, torch.__version__, platform.python_version())
    assert start.ended is not None
    assert TIME.fullmatch(start.began)
    assert TIME.fullmatch(start.ended)
    assert start.began <= start.ended
    assert (start.platform, bool(start.processor)) == (f"{platform.system()} {platform.machine()}", True)


def test_no_user_no_host_and_no_path(whole: Path, tmp_path: Path):
    text = (whole / PROVENANCE).read_text()
    assert not {platform.node(), getpass.getuser()} & {*json.loads(text)["starts"][0].values()}
    assert not [place for place in (whole, provenance.CHECKOUT, Path.home(), tmp_path) if str(place) in text]


def test_a_resumed_run_keeps_its_first_start(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    train_tiny(SHORT, data, tmp_path, Told(3, terminate))
    [first] = read_starts(tmp_path)
    assert first.ended is not None
    monkeypatch.setattr(provenance, "VERSION", "later")
    train_tiny(SHORT, data, tmp_path)
    before, later = read_starts(tmp_path)
    assert before == first
    assert (later.step, later.dualres) == (4, "later")
    assert later.ended is not None
    train_tiny(SHORT, data, tmp_path)  # is finished, so nothing is computed
    assert read_starts(tmp_path) == [before, later]


def test_a_start_that_failed_has_no_end(data: Path, tmp_path: Path):
    def fail() -> None:
        raise MemoryError

    with pytest.raises(MemoryError):
        train_tiny(SHORT, data, tmp_path, Told(3, fail))
    [start] = read_starts(tmp_path)
    assert start.ended is None


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"starts": [3]}', '{"starts": [{"commit": "x"}]}', '{"starts": 1}']
)
def test_runs_without_the_file_or_with_a_damaged_one(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / PROVENANCE).write_text(content)
    assert read_starts(tmp_path) == []
    provenance.record_end(tmp_path)
    assert ((tmp_path / PROVENANCE).read_text() if content is not None else None) == content


def test_what_a_later_version_adds_is_ignored(tmp_path: Path):
    (tmp_path / PROVENANCE).write_text('{"starts": [{"step": 3, "began": "then", "new": 1}]}')
    assert read_starts(tmp_path) == [provenance.Start(3, "then")]


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(["git", "-C", folder, *who, *arguments], check=True, capture_output=True, text=True).stdout


def test_the_commit_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "checkout" / "dualres"
    package.mkdir(parents=True)
    (package / "cli.py").write_text("one")
    monkeypatch.setattr(provenance, "CHECKOUT", package.parent)
    assert provenance._commit() == (None, None)  # not a checkout
    git(tmp_path, "init")
    assert provenance._commit() == (None, None)  # inside someone else's
    git(package.parent, "init")
    git(package.parent, "add", ".")
    git(package.parent, "commit", "-m", "x")
    commit = git(package.parent, "rev-parse", "HEAD").strip()
    (package.parent / "notes.txt").write_text("not code")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a hook of another repository
    assert provenance._commit() == (commit, False)
    (package / "new.py").write_text("untracked")
    assert provenance._commit() == (commit, True)
    (package / "new.py").unlink()
    (package / "cli.py").write_text("two")
    assert provenance._commit() == (commit, True)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance._commit() == (None, None)  # no git


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some CPU @ 2: GHz\nflags\t: x\n\nmodel name\t: Other\n", "Some CPU @ 2: GHz"),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", platform.processor() or platform.machine()),
        (None, platform.processor() or platform.machine()),
    ],
    ids=["linux", "arm", "elsewhere"],
)
def test_the_name_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, name: str):
    monkeypatch.setattr(provenance, "CPUINFO", tmp_path / "cpuinfo")
    if content is not None:
        (tmp_path / "cpuinfo").write_text(content)
    assert provenance._cpu() == name

"""`dualres report --watch`: the page is updated when runs change, and the last one stays as it is."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dualres.cli import main
from dualres.train.metrics import METRICS
from tests.report.reading import parsed


@pytest.fixture
def run(suite: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(suite / "standard-seed0", tmp_path / "suite" / "run"))


def watch(monkeypatch: pytest.MonkeyPatch, out: Path, *between: Callable[[], object]) -> int:
    """Watch the folder `suite` next to `out`; in each pause something happens, and after the last, Ctrl-C."""
    happening = iter(between)

    def pause(seconds: float) -> None:
        assert seconds == 7
        try:
            next(happening)()
        except StopIteration:
            raise KeyboardInterrupt from None

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("dualres.commands.report.time.sleep", pause)
    try:
        folder = out.parent / "suite"
        return main(["report", str(folder), "-o", str(out), "--no-samples", "--watch", "7"])
    finally:
        signal.signal(signal.SIGTERM, before)


def reloads(page: Path) -> list[str]:
    """Both ways: by script, and without."""
    root = parsed(page.read_text())
    meta = [m.attributes["content"] for m in root.all("meta") if m.attributes.get("http-equiv") == "refresh"]
    return [h.attributes["data-refresh"] for h in root.all("html") if "data-refresh" in h.attributes] + meta


def test_it_is_updated_when_a_run_changes(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pages: list[bytes] = []

    def look() -> None:
        pages.append(page.read_bytes())

    def more() -> None:
        look()
        with (run / METRICS).open("a") as file:
            file.write('{"step": 25, "tokens": 3200, "loss": 4.5}\n')

    page = tmp_path / "page.html"
    assert watch(monkeypatch, page, look, more, look, look) == 0
    same, before, after, still = pages
    assert same == before != after == still
    assert b"3,200" in after or b"3200" in after
    assert reloads(page) == []  # the last page
    said = capsys.readouterr()
    assert said.out.count(f"wrote {page}") == 3  # at first, after the change, at the end
    assert said.err == ""
    (tmp_path / "watched.html").write_bytes(after)
    assert reloads(tmp_path / "watched.html") == ["7", "7"]
    assert "reloads itself every 7 seconds" in after.decode()
    assert "reloads itself" not in page.read_text().partition("<main>")[0]


def test_its_own_page_is_not_a_change(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "suite" / "suite").symlink_to(run.parent)
    assert watch(monkeypatch, run.parent / "page.html", lambda: None, lambda: None) == 0
    assert capsys.readouterr().out.count("wrote ") == 2  # at first and at the end


def test_it_waits_for_the_first_step(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page, away = tmp_path / "page.html", tmp_path / "away"
    run.parent.rename(away)
    assert watch(monkeypatch, page, lambda: None, lambda: away.rename(run.parent)) == 0
    assert page.exists()
    said = capsys.readouterr().err
    assert said.count("does not exist") == 1  # told once
    assert "still watching" in said


def test_without_a_page_at_the_end_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    assert watch(monkeypatch, tmp_path / "page.html") == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_terminated_watch_leaves_a_page_that_stays(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.html"
    assert watch(monkeypatch, page, lambda: os.kill(os.getpid(), signal.SIGTERM)) == 0
    assert reloads(page) == []


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_no_such_interval(suite: Path, seconds: str, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(suite), "--watch", seconds]) == 2
    assert "--watch" in capsys.readouterr().err

"""Progress lines, and numbers and times in them."""

import io
import sys

import pytest

from dualres.util.progress import CLEAR, Progress, duration, short


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_one_line(monkeypatch: pytest.MonkeyPatch):
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    progress = Progress()
    progress.show("a")
    progress.show("too soon to read")
    progress.say("important")
    progress.last = 0
    progress.show("b")
    progress.end()
    assert screen.getvalue() == f"{CLEAR}a{CLEAR}important\n{CLEAR}b\n"


def test_a_file_has_lines_now_and_then(monkeypatch: pytest.MonkeyPatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    progress = Progress()
    for number in range(100):
        progress.show(f"step {number}")
    progress.say("done")
    progress.end()
    assert log.getvalue() == "step 0\ndone\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0.5, "0.5"), (999, "999"), (12_345, "12.3k"), (2e9, "2B")])
def test_short(number: float, text: str):
    assert short(number) == text

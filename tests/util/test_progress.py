"""Progress bars and lines, and numbers and times in them."""

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator

import pytest

from dualres.util import progress as module
from dualres.util.progress import CLEAR, Progress, duration, say_as, short

COLOR = re.compile(r"\x1b\[\d*m")


class Terminal:
    """A pseudo-terminal of 80 columns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.monkeypatch = monkeypatch
        self.reader, writer = pty.openpty()
        self.file = open(writer, "w", encoding="utf-8")  # noqa: SIM115  closed by the fixture
        self.resize(80)

    def progress(self) -> Progress:
        """To be called in a test, not in a fixture: pytest replaces standard error between them."""
        self.monkeypatch.setattr(sys, "stderr", self.file)
        self.monkeypatch.setattr(module, "_on_bar", False)
        return Progress()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def read(self) -> str:
        """What was written since the last call; the terminal turns a newline into two characters."""
        os.set_blocking(self.reader, False)
        parts = []
        with contextlib.suppress(BlockingIOError):
            while part := os.read(self.reader, 4096):
                parts.append(part)
        return b"".join(parts).decode().replace("\r\n", "\n")

    def close(self) -> None:
        self.file.close()
        os.close(self.reader)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(monkeypatch)
    yield terminal
    terminal.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock with one reading, which a test sets."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_terminal_shows_one_line(screen: Terminal, clock: list[float]):
    progress = screen.progress()
    progress.show("a")
    progress.show("too soon to read")
    progress.say("important")
    clock[0] += 1
    progress.show("b")
    progress.end()
    assert screen.read() == f"{CLEAR}a{CLEAR}important\n{CLEAR}b\n"


def test_an_error_is_below_the_bar(screen: Terminal):
    screen.progress().show("half", 0.5)
    say_as(0, "interrupted")
    say_as(0, "again")
    assert screen.read().endswith("  half\ndualres: interrupted\ndualres: again\n")


def test_a_bar_has_fraction_and_remaining_time(screen: Terminal, clock: list[float], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    progress = screen.progress()
    for _ in range(3):
        progress.show("work", 0.25)  # resumed: the first quarter took no time
    clock[0] += 60
    progress.show("work", 0.5)
    clock[0] += 1
    progress.show("other work", 0.1)
    progress.show("too soon", 0.2)
    progress.show("the end is shown at any time", 1)
    lines = screen.read().split(CLEAR)[1:]
    assert lines[0] == f"{'━' * 5}{'─' * 14}  25%  work"
    assert lines[1] == f"{'━' * 10}{'─' * 9}  50%  ETA 2:00  work"
    assert lines[2] == f"{'━' * 2}{'─' * 17}  10%  other work"
    assert lines[3].startswith(f"{'━' * 19} 100%  ETA 0:00  the end")
    assert len(lines) == 4


@pytest.mark.parametrize(
    "text", ["step 1/2  " * 30, "数据" * 200, "two\nlines\x1b[31m"], ids=["long", "wide", "control"]
)
@pytest.mark.parametrize("fraction", [None, 0.4], ids=["text", "bar"])
def test_a_line_never_wraps(text: str, fraction: float | None, screen: Terminal, clock: list[float]):
    """Neither when the window is resized between two states."""
    progress = screen.progress()
    for columns in (80, 200, 20, 3, 1):
        screen.resize(columns)
        clock[0] += 1
        progress.show(text, fraction)
        line = COLOR.sub("", screen.read().removeprefix(CLEAR))
        assert len(line) + sum(letter in "数据" for letter in line) < columns
        assert "\n" not in line
        assert "\x1b" not in line
        assert len(line) > 8 or columns < 20


@pytest.mark.parametrize(
    ("changes", "colored", "live"),
    [
        ({}, True, True),
        ({"NO_COLOR": "1"}, False, True),
        ({"NO_COLOR": ""}, True, True),
        ({"TERM": "dumb"}, False, False),
    ],
    ids=str,
)
def test_color_only_where_it_is_wanted(
    changes: dict[str, str], colored: bool, live: bool, screen: Terminal, monkeypatch: pytest.MonkeyPatch
):
    for name, value in changes.items():
        monkeypatch.setenv(name, value)
    progress = screen.progress()
    progress.show("work", 0.5)
    progress.end()
    shown = screen.read()
    assert (COLOR.search(shown) is not None) == colored
    assert shown.startswith(CLEAR) == live
    if not live:
        assert shown == "work\n"


def test_a_bar_without_unicode(screen: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_COLOR", "1")
    screen.file.reconfigure(encoding="ascii")
    screen.progress().show("work", 0.5)
    assert screen.read() == f"{CLEAR}{'#' * 10}{'-' * 9}  50%  work"


def test_a_file_has_lines_now_and_then(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    progress = Progress()
    for number in range(30):
        clock[0] += 1
        progress.show(f"step {number}", number / 30)
    progress.say("done")
    progress.end()
    assert log.getvalue() == "step 0\nstep 10  ETA 0:20\nstep 20  ETA 0:10\ndone\n"


@pytest.mark.parametrize(
    ("verbosity", "muted", "written"),
    [
        (0, False, "a\nnote\nwarning\n"),
        (-1, False, "warning\n"),
        (1, False, "a\nb\nnote\nwarning\n"),
        (1, True, ""),
    ],
    ids=["normal", "quiet", "verbose", "muted"],
)
def test_verbosity(verbosity: int, muted: bool, written: str, monkeypatch: pytest.MonkeyPatch):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    progress = Progress(verbosity, muted)
    progress.show("a")
    progress.show("b")
    progress.say("note")
    progress.warn("warning")
    assert log.getvalue() == written


def test_what_is_named(monkeypatch: pytest.MonkeyPatch, clock: list[float]):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    show = Progress(verbosity=1).named("dar")
    for fraction in (0.0, 0.5):
        clock[0] += 4
        show("loading", fraction)
    assert log.getvalue() == "dar  loading\ndar  loading  ETA 0:04\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3725, "1:02:05")])
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(("number", "text"), [(0.5, "0.5"), (999, "999"), (12_345, "12.3k"), (2e9, "2B")])
def test_short(number: float, text: str):
    assert short(number) == text

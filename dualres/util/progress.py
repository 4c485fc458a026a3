"""Progress messages: a bar on a terminal, an occasional line in a file."""

import math
import os
import sys
import time
import unicodedata
from collections import deque
from typing import Protocol

TERMINAL_SECONDS, FILE_SECONDS = 0.1, 10.0
CLEAR, GREEN, DIM, RESET = "\r\x1b[K", "\x1b[32m", "\x1b[2m", "\x1b[0m"
BAR = 30  # columns of a bar, at most a quarter of the terminal
RECENT = 50  # states from which the remaining time is estimated

_on_bar = False  # whether the cursor is behind a bar: there is one terminal, whoever writes to it


class Show(Protocol):
    """Receives the state of some work, and the fraction of it that is done, if known."""

    def __call__(self, text: str, fraction: float | None = None) -> None: ...


class Progress:
    """Shows the state of a command on standard error: the latest one on a terminal, one now and then in a file.

    `verbosity` below 0 shows only warnings, above 0 every state as a line of its own. `muted` shows nothing at all.
    """

    def __init__(self, verbosity: int = 0, muted: bool = False):
        self.verbosity, self.muted = verbosity, muted
        self.live = verbosity == 0 and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.last = -math.inf
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # time and fraction

    def show(self, text: str, fraction: float | None = None) -> None:
        """Show the current state, unless another was shown just before; the end of a bar is always shown."""
        now = time.monotonic()
        remaining = self._remaining(now, fraction)
        if self.muted or self.verbosity < 0:
            return
        seconds = 0.0 if self.verbosity > 0 else TERMINAL_SECONDS if self.live else FILE_SECONDS
        if now - self.last < seconds and not (self.live and fraction == 1):
            return
        self.last = now
        if self.live:
            _draw(_bar(text, fraction, remaining, _columns()))
        else:
            _write(f"{text}  {remaining}" if remaining else text)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.verbosity >= 0:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Print a line that stays, even if only results and errors were asked for."""
        if not self.muted:
            _write(text)

    def named(self, name: str) -> Show:
        """Shows states of one thing among several."""
        return lambda text, fraction=None: self.show(f"{name}  {text}", fraction)

    def end(self) -> None:
        """Keep the last state on the screen."""
        end_bar()

    def _remaining(self, now: float, fraction: float | None) -> str:
        """The time left at the speed of recent states, in words; empty if it is not known."""
        if fraction is None or (self.recent and fraction < self.recent[-1][1]):  # other work has begun
            self.recent.clear()
        if fraction is None:
            return ""
        self.recent.append((now, fraction))
        seconds, done = now - self.recent[0][0], fraction - self.recent[0][1]
        return f"ETA {duration((1 - fraction) * seconds / done)}" if done > 0 else ""


def say_as(rank: int | str, text: object) -> None:
    """Print a line of one rank in a single write, because other ranks may print at the same time."""
    end_bar()
    sys.stderr.write(f"dualres: {text}\n" if str(rank) == "0" else f"dualres, rank {rank}: {text}\n")
    sys.stderr.flush()


def end_bar() -> None:
    """Continue below the bar, if there is one."""
    global _on_bar
    if _on_bar:
        print(file=sys.stderr, flush=True)
    _on_bar = False


def _draw(line: str) -> None:
    global _on_bar
    print(f"{CLEAR}{line}", end="", file=sys.stderr, flush=True)
    _on_bar = True


def _write(text: str) -> None:
    """Print a line, in place of a bar if there is one."""
    global _on_bar
    print(f"{CLEAR}{text}" if _on_bar else text, file=sys.stderr, flush=True)
    _on_bar = False


def _columns() -> int:
    """The width of the terminal now: its window may have been resized."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _bar(text: str, fraction: float | None, remaining: str, columns: int) -> str:
    """One line that fits the terminal: ━━━━━─────  50%  ETA 1:02  text"""
    columns -= 1  # a cursor behind the last column would be on the next line
    if fraction is None:
        return _clip(text, columns)
    size = min(BAR, columns // 4)
    done = round(size * min(max(fraction, 0.0), 1.0))
    full, empty = "━─" if _has("━─") else "#-"
    parts = full * done, empty * (size - done)
    rest = _clip("  ".join(filter(None, [f" {fraction:4.0%}", remaining, text])), columns - size)
    if os.environ.get("NO_COLOR"):
        return f"{parts[0]}{parts[1]}{rest}"
    return f"{GREEN}{parts[0]}{RESET}{DIM}{parts[1]}{RESET}{rest}"


def _has(letters: str) -> bool:
    """Whether standard error can show these characters."""
    try:
        letters.encode(sys.stderr.encoding or "ascii")
    except UnicodeEncodeError:
        return False
    return True


def _clip(text: str, columns: int) -> str:
    """As much of the text as fits: Chinese characters take two columns, and control characters are replaced."""
    shown = ""
    for letter in text:
        letter = letter if letter.isprintable() else "?"
        columns -= 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        if columns < 0:
            break
        shown += letter
    return shown


def silent(text: str, fraction: float | None = None) -> None:
    """A `Show` that ignores everything."""


def duration(seconds: float) -> str:
    """3725 -> '1:02:05'"""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short(number: float) -> str:
    """1234567 -> '1.23M'"""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"


def plural(number: int, noun: str, ending: str = "s") -> str:
    """3 runs, 1 run"""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{ending}"

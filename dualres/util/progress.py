"""Progress messages: one updating line on a terminal, an occasional line in a file."""

import sys
import time
from collections.abc import Callable

Show = Callable[[str], None]  # receives progress messages

TERMINAL_SECONDS, FILE_SECONDS = 0.1, 10.0
CLEAR = "\r\x1b[K"


class Progress:
    """Shows the latest text on standard error, rate-limited."""

    def __init__(self, quiet: bool = False):
        self.quiet = quiet
        self.live = sys.stderr.isatty()
        self.last = 0.0
        self.shown = False  # whether the cursor is on a progress line

    def show(self, text: str) -> None:
        """Show the current state, unless another was shown just before."""
        now = time.monotonic()
        if self.quiet or now - self.last < (TERMINAL_SECONDS if self.live else FILE_SECONDS):
            return
        self.last = now
        self.shown = self.live
        print(f"{CLEAR}{text}" if self.live else text, end="" if self.live else "\n", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self.quiet:
            return
        if self.shown:
            print(CLEAR, end="", file=sys.stderr)
            self.shown = False
        print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Keep the last state on the screen."""
        if self.shown:
            print(file=sys.stderr, flush=True)
            self.shown = False


def say_as(rank: int | str, text: object) -> None:
    """Print a line of one rank in a single write, because other ranks may print at the same time."""
    sys.stderr.write(f"dualres: {text}\n" if str(rank) == "0" else f"dualres, rank {rank}: {text}\n")
    sys.stderr.flush()


def silent(text: str) -> None:
    """A `Show` that ignores messages."""


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

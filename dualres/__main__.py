"""`python -m dualres`, and the console script `dualres`.

Ctrl-C is handled before anything else is imported: an interrupted import of torch would print a long traceback, or
ignore the interruption.
"""

import os
import signal
import sys
from types import FrameType


def run() -> None:
    """Run the command line. Characters that the terminal cannot show, such as × or ρ, become question marks."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs of a shell ignore it
        signal.signal(signal.SIGINT, _interrupt)
    import contextlib
    import io

    from dualres import cli
    from dualres.util import optional_dependencies
    from dualres.util.errors import INTERRUPTED

    optional_dependencies.on_demand = True
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # read by transformers when a command imports it
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115, None if it is closed
        setattr(sys, name, stream)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        code = cli.main()
    except KeyboardInterrupt:  # another one, while the first was reported
        code = INTERRUPTED
    if code == INTERRUPTED:
        # In a normal exit, threads that still run could abort the process: "FATAL: exception not rethrown".
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process at once during an import, with an exception elsewhere."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"dualres: interrupted\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    run()

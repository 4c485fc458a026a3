"""`python -m dualres` is `dualres`."""

from dualres.cli import run

run()

"""No wrong argument to a public entry ends the process, and every refusal says what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # test_dispatch.py and test_shapes.py refuse the same arguments, without a process of their own
def test_wrong_arguments():
    """In a process of its own: a kernel that is given a wrong address ends it."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.sweep_worker"], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    lines = run.stdout.splitlines()
    assert run.returncode == 0, f"{run.returncode} after {lines[-1:]}: {run.stderr[-2000:]}"
    unnamed = [" ".join(lines[n - 2 : n]) for n, line in enumerate(lines) if line == "UNNAMED"]
    assert not unnamed
    assert lines[-1] == "survived"

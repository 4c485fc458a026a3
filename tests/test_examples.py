"""The examples run, and say what the docs say of them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_add_to_your_model():
    losses = [float(x) for x in re.findall(r"loss after 200 steps ([\d.]+)", run("add_to_your_model.py"))]
    assert len(losses) == 2
    assert all(loss < 3.3 for loss in losses)  # ln 32 = 3.47 is guessing


def test_ten_changed_lines():
    """Lines marked as changed, and those of `Before` that they replace."""
    text = (EXAMPLES / "add_to_your_model.py").read_text()

    def class_body(name: str) -> list[str]:
        return text.split(f"class {name}(")[1].split("\nclass ")[0].split("\ndef ")[0].splitlines()[1:]

    before, after = class_body("Before"), class_body("After")
    unmarked = [line for line in after if "# changed" not in line]
    assert text.count("# changed") <= 10
    assert not [line for line in unmarked if line.strip() and '"""' not in line and line not in before]


@pytest.mark.slow
def test_every_method():
    text = run("every_method.py", "--batch", "1", "--rounds", "1")
    for name in ("standard", "mhc-4", "attnres-full", "dar-block", "dar-crossv"):
        assert name in text

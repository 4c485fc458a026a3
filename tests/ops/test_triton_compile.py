"""Every Triton kernel compiles for every GPU generation, and keeps all it works on in registers."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dualres.ops.traffic import ONE_PASS

pytest.importorskip("triton")
TARGETS = ["sm_80", "sm_90", "sm_100", "sm_120", "gfx90a", "gfx942", "gfx1100"]
LESS_USED = {"sm_120", "gfx90a", "gfx1100"}
WIDTHS = [640, 1024, 1280, 2048, 4096]
BETWEEN = {1024, 1280, 2048}  # they need fewer registers than 4096
MATRIX = [(target, dtype, width) for target in TARGETS for dtype in ("bfloat16", "float32") for width in WIDTHS]
KERNELS = {
    *("prefix._prefix", "prefix._products", "prefix._prefix_backward"),
    *("live._read", "live._read_backward", "live._transport_backward", "live._weight_gradients"),
    *("live._write", "live._write_backward"),
    *("hyper._project", "hyper._mix", "hyper._sum_rows"),
    *("hyper._products", "hyper._mix_backward", "hyper._row_gradients", "hyper._weight_gradients"),
}


@pytest.mark.slow
@pytest.mark.axes(target="sm_90", dtype="bfloat16", width=4096)  # the widest rows need the most registers
@pytest.mark.parametrize(
    ("target", "dtype", "width"),
    [
        pytest.param(target, dtype, width, marks=pytest.mark.exhaustive)
        if target in LESS_USED or width in BETWEEN
        else (target, dtype, width)
        for target, dtype, width in MATRIX
    ],
)
def test_no_kernel_spills(target: str, dtype: str, width: int):
    check_that_nothing_spills(target, dtype, width)


@pytest.mark.slow
def test_a_kernel_that_takes_every_register_does_not_spill():
    """That of gradients of updates in mHC-4."""
    check_that_nothing_spills("sm_120", "float32", 640)


def check_that_nothing_spills(target: str, dtype: str, width: int) -> None:
    rows = compiled(target, dtype, str(width))
    in_one_pass = {"live._weight_gradients"} if width <= min(ONE_PASS.values()) else set()
    assert {row["kernel"] for row in rows} == KERNELS - in_one_pass
    assert not [row for row in rows if row["stack"] or row["spills"]]
    assert not [row for row in rows if row["narrow"]], "streams are loaded element by element"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", pytest.param("gfx942", marks=pytest.mark.exhaustive)])
def test_the_gauges_move(target: str):
    """mHC with 8 streams does spill, and rows of odd width cannot be loaded by vectors."""
    rows = compiled(target, "bfloat16", "123", "8")
    assert [row for row in rows if row["stack"] and row["spills"]]
    assert [row for row in rows if row["narrow"]]


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """What the worker found, kernel by kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.compile_worker", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]

"""A virtual machine that offers AMX and hides how it is used: bfloat16 products work there all the same."""

import os
import subprocess
import sys

import pytest

from dualres.util.amx import LIMIT, WITHOUT_AMX, has_hidden_tiles

INFO = "processor\t: {number}\nmodel name\t: Some CPU @ 2: GHz\ncpuid level\t: {level}\nflags\t\t: fpu {flags} avx2\n\n"
PRODUCT = """
import os, torch
from dualres.util.amx import avoid_hidden_tiles
avoid_hidden_tiles()
a = torch.ones(128, 64, dtype=torch.bfloat16)
print(torch.nn.functional.linear(a, a).sum().item(), os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""


@pytest.mark.parametrize(
    ("level", "flags", "hidden"),
    [(28, "amx_bf16 amx_tile", True), (29, "amx_bf16 amx_tile", False), (32, "amx_tile", False), (22, "avx", False)],
)
def test_the_words_of_the_system(level: int, flags: str, hidden: bool):
    assert has_hidden_tiles("".join(INFO.format(number=n, level=level, flags=flags) for n in range(2))) == hidden


def test_another_architecture_has_no_such_words():
    assert not has_hidden_tiles("processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd bf16\n")


@pytest.mark.parametrize("own", [None, "AVX2"])
def test_bfloat16_products_end_well(own: str | None):
    """Where tiles are hidden, the process would die of SIGILL; a limit of the user's own stays."""
    environment = {name: value for name, value in os.environ.items() if name != LIMIT}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        env={**environment, **({LIMIT: own} if own else {})},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    total, limit = done.stdout.split()
    assert float(total) == 128 * 128 * 64
    assert limit in ({own} if own else {"None", WITHOUT_AMX})

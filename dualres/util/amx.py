"""Virtual machines that offer the CPU's matrix unit (AMX) and hide how it is used: PyTorch must do without it there."""

import functools
import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
TILES_LEAF = 0x1D  # of CPUID: it says what AMX tiles there are
LIMIT, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"  # what oneDNN, PyTorch's library of products, obeys


def hides_its_tiles(cpuinfo: str) -> bool:
    """Whether a processor, in the words of /proc/cpuinfo, has the flag of AMX and no leaf that describes its tiles."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    said = {name.strip(): value.split() for name, _, value in lines}
    level = said.get("cpuid level") or [str(TILES_LEAF)]
    return "amx_tile" in said.get("flags", ()) and int(level[0]) < TILES_LEAF


@functools.cache
def avoid_hidden_tiles() -> None:
    """Keep oneDNN from AMX where it would configure no tiles and die of an illegal instruction at a bfloat16 product.

    Training, generation and `open_model` call it before their first product; a loop of your own that computes in
    bfloat16 on such a machine must do so too. A limit that the user has set stays.
    """
    try:
        cpuinfo = CPUINFO.read_text()
    except OSError:  # not Linux
        return
    if hides_its_tiles(cpuinfo):
        os.environ.setdefault(LIMIT, WITHOUT_AMX)

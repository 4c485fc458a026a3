"""Keeps PyTorch from using AMX, the CPU's matrix unit, on virtual machines that expose it incompletely."""

import functools
import os
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
TILES_LEAF = 0x1D  # the CPUID leaf that describes AMX tiles
LIMIT, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"  # read by oneDNN, which PyTorch uses


def has_hidden_tiles(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo shows a processor with the AMX flag but without the CPUID leaf for its tiles."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    fields = {name.strip(): value.split() for name, _, value in lines}
    level = fields.get("cpuid level") or [str(TILES_LEAF)]
    return "amx_tile" in fields.get("flags", ()) and int(level[0]) < TILES_LEAF


@functools.cache
def avoid_hidden_tiles() -> None:
    """Disable AMX in oneDNN where a bfloat16 matmul would crash with an illegal instruction (tiles not configured).

    Training, generation and `open_model` call it before their first matmul; your own loop must too if it computes in
    bfloat16 on such a machine. A limit that the user has set is kept.
    """
    try:
        cpuinfo = CPUINFO.read_text()
    except OSError:  # not Linux
        return
    if has_hidden_tiles(cpuinfo):
        os.environ.setdefault(LIMIT, WITHOUT_AMX)

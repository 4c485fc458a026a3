"""The device of a command, and its memory."""

import contextlib
import os
import re
from pathlib import Path

import torch

from dualres.config.schema import ConfigError
from dualres.util.progress import plural

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # limit, usage and statistics of a container, in versions 2 and 1 of control groups
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)


def pick_device(name: str) -> torch.device:
    """The device for auto (a GPU if available), cpu, cuda or cuda:N, which must exist."""
    gpus = torch.cuda.device_count()
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"--device {name} is not a device: use auto, cpu, cuda or cuda:N")
    device = torch.device(("cuda" if gpus else "cpu") if name == "auto" else name)
    if device.type == "cuda" and gpus == 0:
        raise ConfigError(
            f"--device {name}: this machine has no GPU that PyTorch can use; use --device cpu, or install a PyTorch "
            "that supports your GPU"
        )
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ConfigError(f"--device {name}: this machine has {plural(gpus, 'GPU')}; use cuda:0 to cuda:{gpus - 1}")
    return device


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, or of the machine or its control group, whichever has less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = [_physical_memory()]
    with contextlib.suppress(OSError, ValueError, KeyError):  # not Linux
        free.append(_numbers(MEMINFO)["MemAvailable"] * 1024)
    for limit, used, statistics in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError, KeyError):  # another version of control groups, or no limit
            reclaimable = _numbers(CGROUP / statistics)["inactive_file"]  # counted as used
            free.append(int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text()) + reclaimable)
    return min(free)


def total_memory(device: torch.device) -> int:
    """All bytes of a GPU, or of the machine or its control group, whichever has less."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total = [_physical_memory()]
    for limit, *_ in CGROUP_FILES:
        with contextlib.suppress(OSError, ValueError):  # another version of control groups, or no limit
            total.append(int((CGROUP / limit).read_text()))
    return min(total)


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _numbers(path: Path) -> dict[str, int]:
    """Parse lines such as `MemFree: 12 kB`."""
    return {words[0].rstrip(":"): int(words[1]) for line in path.read_text().splitlines() if (words := line.split())}

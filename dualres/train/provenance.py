"""Where a run was computed: commit, versions, machine and time of each of its starts, in provenance.json.

Run folders and reports are shared, so no user name, host name or path is recorded.
"""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from dualres.train.process_group import World
from dualres.util.atomic_files import write_json
from dualres.util.version import VERSION

PROVENANCE, STARTS = "provenance.json", "starts"
CHECKOUT = Path(__file__).parents[2]  # the repository, unless dualres is installed without one
CPUINFO = Path("/proc/cpuinfo")
GIT_SECONDS = 10


class Start(NamedTuple):
    """One start of a run; it computed the steps after `step`, up to the next start's."""

    step: int
    began: str  # UTC, as is `ended`
    ended: str | None = None  # None: it still runs, or failed
    dualres: str | None = None
    commit: str | None = None  # None: not a checkout, or no git
    modified: bool | None = None  # whether the package differed from the commit
    torch: str | None = None
    python: str | None = None
    platform: str | None = None
    processor: str | None = None  # name of the CPU or GPU
    processes: int | None = None
    threads: int | None = None

    @property
    def code(self) -> str | None:
        """The commit in short, with a remark if the package differed from it."""
        return None if self.commit is None else str(self.commit)[:9] + (" with changes" if self.modified else "")


def record_start(folder: Path, step: int, world: World) -> None:
    """Add a start after the earlier ones, so that a reader can tell what was mixed."""
    commit, modified = _commit()
    start = Start(
        step=step,
        began=_now(),
        dualres=VERSION,
        commit=commit,
        modified=modified,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        processor=_cpu() if world.device.type == "cpu" else torch.cuda.get_device_name(world.device),
        processes=world.size,
        threads=torch.get_num_threads(),
    )
    _write(folder, [*read_starts(folder), start])


def record_end(folder: Path) -> None:
    if starts := read_starts(folder):
        _write(folder, [*starts[:-1], starts[-1]._replace(ended=_now())])


def read_starts(folder: Path) -> list[Start]:
    """The starts of a run, oldest first; none for a run without the file, or if it is damaged."""
    try:
        listed = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))[STARTS]
        starts = [Start(**{key: start[key] for key in Start._fields if key in start}) for start in listed]
        if not all(isinstance(start.step, int) and isinstance(start.began, str) for start in starts):
            raise ValueError("a start without step and time")
        return starts
    except (OSError, ValueError, TypeError, KeyError):
        return []


def _write(folder: Path, starts: list[Start]) -> None:
    write_json(folder / PROVENANCE, {STARTS: [start._asdict() for start in starts]})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout, and whether the package differs from it."""
    if not (CHECKOUT / ".git").exists():  # a repository further up, such as one with a venv, is not ours
        return None, None
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--", "dualres"]
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # a hook's repository
    try:
        status = subprocess.run(
            command, cwd=CHECKOUT, env=ours, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = status.stdout.splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    return (commits[0] if commits else None), any(not line.startswith("#") for line in lines)


def _cpu() -> str:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()

"""How long the command line takes to respond, and how large the base installation is.

    python benchmarks/import_time.py [--rounds 5]

Every round starts a fresh process per row, one after another, so that load on the machine affects all rows. Elapsed and
CPU seconds of the process, median over rounds; the ratio is of elapsed time, to `import torch` of the same round.
The installation counts the packages that dualres requires without extras, installed here, beside those of torch.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, distribution
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dualres.cli import COMMANDS

BASE = "import torch"
PROGRAMS = {
    "pass": "pass",
    BASE: BASE,
    "import dualres": "import dualres",
    "every public name": "import dualres; [getattr(dualres, name) for name in dualres.__all__]",
    "import dualres.hub": "import dualres.hub",
}
LINES = ["--version", "--help", *(f"{name} --help" for name in COMMANDS), "trian", "train --typo", "train nano"]
ROWS = {name: ["-c", program] for name, program in PROGRAMS.items()}
ROWS |= {f"dualres {line}": ["-m", "dualres", *line.split()] for line in LINES}


class Seconds(NamedTuple):
    elapsed: float
    cpu: float


def main() -> None:
    """Measure and print a line per row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[Seconds]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name, arguments in ROWS.items():
            times[name].append(measure(arguments))
    print(f"{'':26} {'elapsed':>8} {'CPU':>8} {'× torch':>8}")
    for name, row in times.items():
        ratios = [one.elapsed / torch.elapsed for one, torch in zip(row, times[BASE], strict=True)]
        medians = (statistics.median(column) for column in zip(*row, strict=True))
        print(f"{name:26} {' '.join(f'{seconds:8.3f}' for seconds in medians)} {statistics.median(ratios):8.2f}")
    own = required("torch")
    beside = required("dualres") - own - {"dualres"}
    print(f"\ntorch: {len(own)} packages, {megabytes(own):,.0f} MB")
    print(f"base beside it: {len(beside)} packages, {megabytes(beside):,.0f} MB: {', '.join(sorted(beside))}")


def measure(arguments: list[str]) -> Seconds:
    """Elapsed time, and user and system time, of one process."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    elapsed, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(elapsed, (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime))


def required(name: str) -> set[str]:
    """A package and all that it requires, directly or indirectly, without extras and as far as it is installed."""
    found: set[str] = set()
    names = [canonicalize_name(name)]
    for name in names:
        try:
            requirements = [Requirement(text) for text in distribution(name).requires or ()]
        except PackageNotFoundError:
            continue
        found.add(name)
        wanted = [each for each in requirements if each.marker is None or each.marker.evaluate({"extra": ""})]
        names += [name for each in wanted if (name := canonicalize_name(each.name)) not in names]
    return found


def megabytes(names: set[str]) -> float:
    """What the files of these packages occupy."""
    files = [file.locate() for name in names for file in distribution(name).files or ()]
    return sum(os.path.getsize(file) for file in files if os.path.isfile(file)) / 1e6


if __name__ == "__main__":
    main()

"""How long `import dualres` takes compared with `import torch`, and how long the command line takes to respond.

    python benchmarks/import_time.py [--rounds 5]

Every round starts a fresh process per row, one after another, so that load on the machine affects all rows. CPU
seconds of the process, median over rounds; the ratio is to `import torch` of the same round.
"""

import argparse
import resource
import statistics
import subprocess
import sys

BASE = "import torch"
ROWS = {
    BASE: ["-c", BASE],
    "import dualres": ["-c", "import dualres"],
    "every public name": ["-c", "import dualres; [getattr(dualres, name) for name in dualres.__all__]"],
    "import dualres.hub": ["-c", "import dualres.hub"],
    "dualres --version": ["-m", "dualres", "--version"],
    "dualres train --help": ["-m", "dualres", "train", "--help"],
    "dualres train --typo": ["-m", "dualres", "train", "--typo"],
}


def main() -> None:
    """Measure and print a line per row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name, arguments in ROWS.items():
            seconds[name].append(cpu_seconds(arguments))
    print(f"{'':22} {'seconds':>8} {'× torch':>8}")
    for name, values in seconds.items():
        ratios = [value / torch for value, torch in zip(values, seconds[BASE], strict=True)]
        print(f"{name:22} {statistics.median(values):8.2f} {statistics.median(ratios):8.2f}")


def cpu_seconds(arguments: list[str]) -> float:
    """User and system time of one process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)


if __name__ == "__main__":
    main()

"""Summarizes a suite's analyses by method, over seeds: the numbers of docs/study.md.

dualres analyze suites/nano/*-seed* && python benchmarks/streams.py suites/nano
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dualres.analyze.analysis import FOLDER, Analysis, read_analysis
from dualres.report.statistics import estimate
from dualres.util.tables import table


def late_cka(analysis: Analysis) -> float:
    """CKA of streams 0 and 1 at different layers of the last half of the network."""
    cka = analysis.arrays["cka"][0, 1]
    half = len(cka) // 2
    late = cka[half:, half:]
    return float(np.nanmean(late[~np.eye(len(late), dtype=bool)]))


def apart_cka(analysis: Analysis) -> float:
    """CKA of streams 0 and 1 at different layers of the whole network."""
    cka = analysis.arrays["cka"][0, 1]
    return float(np.nanmean(cka[~np.eye(len(cka), dtype=bool)]))


COLUMNS: dict[str, tuple[str, Callable[[Analysis], float]]] = {  # the array it needs, and its computation
    "CKA, same layer": ("cka", lambda a: float(np.nanmean(a.arrays["cka"][0, 1].diagonal()))),
    "CKA, other layers": ("cka", apart_cka),
    "CKA, late layers": ("cka", late_cka),
    "rescue, stream 0": ("rescue", lambda a: float(a.arrays["rescue"][:, 0].mean())),
    "rescue, stream 1": ("rescue", lambda a: float(a.arrays["rescue"][:, 1].mean())),
    "|rescue gap|": ("rescue_gaps", lambda a: float(np.abs(a.arrays["rescue_gaps"]).mean())),
    "|mean rescue gap|": ("rescue_gaps", lambda a: abs(float(a.arrays["rescue_gaps"].mean()))),
    "|write gap|": ("write_gaps", lambda a: a.summary["mean_absolute_write_gap"]),
    "r": ("write_gaps", lambda a: a.summary["gap_correlation"]),
    "divergence": ("divergence", lambda a: float(a.arrays["divergence"].mean())),
}


def main() -> None:
    """Print a line per method and column: mean ± half of its 95% interval, then each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="folder of a suite with analyzed runs")
    suite = parser.parse_args().suite
    methods: dict[str, list[Analysis]] = {}
    for run in sorted(path for path in suite.iterdir() if path.is_dir()):
        if (found := read_analysis(run / FOLDER)) is not None:
            method = run.name.rpartition("-seed")[0]
            methods.setdefault(method, []).append(found)
    if not methods:
        raise SystemExit(f"no run in {suite} has an analysis: dualres analyze {suite}/*-seed*")
    lines = []
    for name, (needs, value) in COLUMNS.items():
        for method, analyses in methods.items():
            values = [value(analysis) for analysis in analyses if needs in analysis.arrays]
            if values:
                lines.append([name, method, estimate(values).text(3), "  ".join(f"{v:.3f}" for v in values)])
    print(table(["measure", "method", "mean", "by seed"], lines))


if __name__ == "__main__":
    main()

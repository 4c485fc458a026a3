"""`dualres suite`: methods side by side at equal data and budget."""

import argparse
import sys
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.commands.train import DEFAULT_DATA, ensure_default_data
from dualres.config import paper
from dualres.config.loading import load_config, names, short_name
from dualres.config.schema import ConfigError
from dualres.report import loss_curves, suite, suite_tables
from dualres.report.suite import BASE, Matrix
from dualres.util.atomic_files import write_json, write_text
from dualres.util.tables import table

PRESETS = {"size-sweep": paper.SIZE_SWEEP, "kv-ablation": paper.KV_ABLATION}
RESULTS, TABLE, CURVES = "suite.json", "table.txt", "curves"


def add(commands: Any) -> None:
    """Declare it."""
    sub = arguments.command(
        commands,
        "suite",
        "compare residual methods: runs, table, loss curves",
        "Train every residual with every seed at SCALE, with equal data order and budget, one run after the other,\n"
        "then print a table: validation loss with its 95% interval, the difference to `standard` paired by seed, and\n"
        "tokens/s and peak memory relative to `standard`. Draws the loss curves. The same command goes on after an\n"
        "interruption, and prints the table of finished runs without running them again.",
        f"{arguments.known()}"
        "presets:    size-sweep, kv-ablation: the paper's two loss tables, its numbers beside ours\n"
        "overrides:  --set KEY=VALUE, as often as needed, for all runs: --set train.tokens=1e7 --set model.layers=12\n"
        "            options of a method belong in a residual file; docs/reference/configuration.md lists every key\n\n"
        "examples:\n"
        "  dualres suite nano --residuals standard,attnres-block,dar-block --seeds 0,1,2\n"
        "  dualres suite nano --residuals standard,dar-block --learning-rates 1e-3,3e-3,6e-3\n"
        "  dualres suite size-sweep --data data/fineweb --processes 8\n"
        "  dualres suite kv-ablation --at nano        the same methods at a size for a laptop\n"
        "  dualres suite size-sweep --table           what is finished, without running anything",
    )
    sub.add_argument("scale", metavar="SCALE", help="a scale by name or path, or a preset")
    sub.add_argument("--residuals", metavar="A,B", help="names or paths of residuals (default: all that ship)")
    sub.add_argument("--seeds", metavar="N,N", help="default: the scale's train.seed, 42")
    sub.add_argument("--learning-rates", metavar="X,X", help="run each method at each; the table has its best")
    sub.add_argument("--at", dest="stand_in", metavar="SCALE", help="run a preset at this scale instead of the paper's")
    sub.add_argument("--data", metavar="D", type=Path, default=DEFAULT_DATA, help=f"prepared data ({DEFAULT_DATA})")
    sub.add_argument("--out", metavar="DIR", type=Path, help="folder of the runs (default suites/SCALE)")
    sub.add_argument("--processes", metavar="N", type=int, default=1, help="of each run, on this machine (default 1)")
    sub.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where there is one")
    sub.add_argument("--table", action="store_true", help="only print the table of what is finished")
    arguments.overrides(sub)
    sub.set_defaults(command=_suite)


def _suite(given: argparse.Namespace) -> int:
    asked = matrix_of(given)
    suite.check(asked)
    failed = []
    if not given.table:
        ensure_default_data(given.data)
        suite.check_start(asked)
        asked.out.mkdir(parents=True, exist_ok=True)
        failed = suite.run_all(asked, _say)
    found = suite.results(asked)
    texts = _tables(given, found)
    if texts:
        print("\n\n".join(texts))
    if found and not given.table:
        print(f"\nwritten: {', '.join(str(file) for file in _write(asked, found, texts))}")
    if not found:
        _say(f"dualres: no run of this suite is finished in {asked.out}")
    if failed:
        which = ", ".join(cell.name for cell in failed)
        _say(
            f"dualres: {len(failed)} of {len(asked.cells)} runs failed, for the reasons above: {which}. The same "
            "command tries them again"
        )
    return 1 if failed or not texts else 0


def matrix_of(given: argparse.Namespace) -> Matrix:
    """The runs that the arguments ask for."""
    if given.processes < 1:
        raise ConfigError(f"--processes {given.processes} is not positive: use 1 or more")
    seeds = _list(given.seeds, int, "--seeds", "0,1,2")
    rates: list[float | None] = [*_list(given.learning_rates, float, "--learning-rates", "1e-3,3e-3")] or [None]
    out = given.out or Path("suites") / short_name(given.scale)
    if given.scale in PRESETS:
        if given.residuals:
            raise ConfigError(f"--residuals with the preset {given.scale}: leave it out, or name a scale")
        pairs = [*dict.fromkeys((given.stand_in or cell.scale, cell.residual) for cell in PRESETS[given.scale])]
    else:
        if given.stand_in:
            raise ConfigError(f"--at {given.stand_in} is for presets: give the scale itself")
        residuals = _list(given.residuals, str, "--residuals", "standard,dar-block") or names("residual")
        pairs = [(given.scale, residual) for residual in residuals]
    seeds = seeds or [load_config(*pairs[0], given.set).train.seed]
    return Matrix(suite.cells(pairs, seeds, rates), given.data, out, tuple(given.set), given.processes, given.device)


def _tables(given: argparse.Namespace, found: list[suite.Result]) -> list[str]:
    """The methods, the rates of a sweep, and the paper's table of a preset."""
    rows = suite_tables.compare(found)
    texts = [suite_tables.as_text(rows)] if rows else []
    if given.learning_rates and rows:
        lines = [[scale, method, f"{rate:g}", loss.text()] for scale, method, rate, loss in suite_tables.sweep(found)]
        texts.append(table(["scale", "method", "rate", "validation loss"], lines))
    if given.scale in PRESETS:
        printed = PRESETS[given.scale]
        scales = {cell.scale: given.stand_in for cell in printed} if given.stand_in else {}
        texts.append(suite_tables.paper_table(printed, rows, scales))
    return texts


def _write(asked: Matrix, found: list[suite.Result], texts: list[str]) -> list[Path]:
    """Tables, numbers and picture, into the suite's folder."""
    write_text(asked.out / TABLE, "\n\n".join(texts) + "\n")
    runs = [{**result.cell._asdict(), **result.summary} for result in found]
    settings = {"data": str(asked.data), "overrides": asked.overrides, "base": BASE}
    write_json(
        asked.out / RESULTS, {**settings, "rows": suite_tables.as_data(suite_tables.compare(found)), "runs": runs}
    )
    return [asked.out / TABLE, asked.out / RESULTS, *loss_curves.draw(found, asked.out / CURVES)]


def _list(text: str | None, kind: Any, option: str, example: str) -> list[Any]:
    """'a,b' as values, each once."""
    if text is None:
        return []
    try:
        values = [kind(part) for part in text.split(",") if part]
    except ValueError:
        raise ConfigError(f"{option} {text} is not a list of numbers: write {example}") from None
    if not values or len(set(values)) < len(values):
        what = "has a value twice" if values else "is empty"
        raise ConfigError(f"{option} {text} {what}: write {example}")
    return values


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

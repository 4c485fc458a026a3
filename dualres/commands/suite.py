"""`dualres suite`: methods side by side at equal data and budget."""

import argparse
import sys
from pathlib import Path
from typing import Any

from dualres import paper
from dualres.commands import arguments
from dualres.commands.train import DEFAULT_DATA, ensure_default_data
from dualres.config import ConfigError
from dualres.experiment import names, short_name
from dualres.files import write_json, write_text
from dualres.suite import compare, matrix, picture
from dualres.suite.matrix import BASE, Plan
from dualres.table import table

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
        f"{arguments.OVERRIDES}\n"
        "examples:\n"
        "  dualres suite nano --residuals standard,attnres-block,dar-block --seeds 0,1,2\n"
        "  dualres suite nano --residuals standard,dar-block --learning-rates 1e-3,3e-3,6e-3\n"
        "  dualres suite size-sweep --data data/fineweb --processes 8\n"
        "  dualres suite kv-ablation --at nano        the same methods at a size for a laptop\n"
        "  dualres suite size-sweep --table           what is finished, without running anything",
    )
    sub.add_argument("scale", metavar="SCALE", help="a scale by name or path, or a preset")
    sub.add_argument("--residuals", metavar="A,B", help="names or paths of residuals (default: all that ship)")
    sub.add_argument("--seeds", metavar="N,N", help="default: the scale's one seed, 42")
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
    plan = plan_of(given)
    matrix.check(plan)
    failed = []
    if not given.table:
        ensure_default_data(given.data)
        plan.out.mkdir(parents=True, exist_ok=True)
        failed = matrix.run_all(plan, lambda text: print(text, file=sys.stderr, flush=True))
    found = matrix.results(plan)
    if found or given.scale in PRESETS:
        print(_report(given, plan, found))
    else:
        print(f"dualres: no run of this suite is finished in {plan.out}", file=sys.stderr)
    return 1 if failed or not (found or given.table) else 0


def plan_of(given: argparse.Namespace) -> Plan:
    """The runs that the arguments ask for."""
    seeds = _list(given.seeds, int, "--seeds") or [42]
    rates: list[float | None] = [*_list(given.learning_rates, float, "--learning-rates")] or [None]
    out = given.out or Path("suites") / short_name(given.scale)
    if given.scale in PRESETS:
        if given.residuals:
            raise ConfigError(f"--residuals with the preset {given.scale}: leave it out, or name a scale")
        pairs = dict.fromkeys((given.stand_in or cell.scale, cell.residual) for cell in PRESETS[given.scale])
        found = [cell for scale, residual in pairs for cell in matrix.cells(scale, [residual], seeds, rates)]
    else:
        if given.stand_in:
            raise ConfigError(f"--at {given.stand_in} is for presets: give the scale itself")
        residuals = _list(given.residuals, str, "--residuals") or names("residual")
        found = [*matrix.cells(given.scale, residuals, seeds, rates)]
    return Plan(tuple(found), given.data, out, tuple(given.set), given.processes, given.device)


def _report(given: argparse.Namespace, plan: Plan, found: list[matrix.Result]) -> str:
    """Print-out of the tables, which are also written to the suite's folder with the picture."""
    rows = compare.compare(found)
    parts = [compare.as_text(rows)] if rows else []
    if given.learning_rates and rows:
        lines = [[scale, method, f"{rate:g}", loss.text()] for scale, method, rate, loss in compare.sweep(found)]
        parts.append(table(["scale", "method", "rate", "validation loss"], lines))
    if given.scale in PRESETS:
        printed = PRESETS[given.scale]
        scales = {cell.scale: given.stand_in for cell in printed} if given.stand_in else {}
        parts.append(compare.paper_table(printed, rows, scales))
    if found:
        pictures = picture.draw(found, plan.out / CURVES)
        write_text(plan.out / TABLE, "\n\n".join(parts) + "\n")
        runs = [{**result.cell._asdict(), **result.summary} for result in found]
        settings = {"data": str(plan.data), "overrides": plan.overrides, "base": BASE}
        write_json(plan.out / RESULTS, {**settings, "rows": compare.as_data(rows), "runs": runs})
        parts.append(f"written: {plan.out / TABLE}, {RESULTS}, {', '.join(file.name for file in pictures)}")
    return "\n\n".join(parts)


def _list(text: str | None, kind: Any, option: str) -> list[Any]:
    """'a,b' as values."""
    try:
        return [kind(part) for part in text.split(",") if part] if text else []
    except ValueError:
        raise ConfigError(f"{option} {text} is not a list of numbers: write 0,1,2") from None

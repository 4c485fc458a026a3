"""Documents of the zero-shot tasks in the hub's schema, made up, as files and as rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[Mapping[str, Any]]


def _choices(*texts: str) -> dict[str, list[str]]:
    return {"text": [*texts], "label": ["A", "B", "C", "D"][: len(texts)]}


FILES: dict[str, list[dict[str, Any]]] = {
    "hellaswag_validation.jsonl": [
        {
            "ind": number,
            "activity_label": label,
            "ctx_a": "A man sits on a roof [title] with tools.",
            "ctx_b": begin,
            "ctx": f"A man sits on a roof. {begin}",
            "endings": ["is using wrap.", "rips  tiles [step] off.", "holds a cube of many colours.", "sings."],
            "source_id": "x",
            "split": "val",
            "split_type": "indomain",
            "label": gold,
        }
        for number, (label, begin, gold) in enumerate(
            [("Roof removal", "he", "3"), ("Singing", "the man", "0"), ("Cooking", "she", "1"), ("Wood", "they", "2")]
        )
    ],
    "piqa_validation.jsonl": [
        {"goal": "ready a cage", "sol1": "Use paper strips.", "sol2": "Use jeans.", "label": 0},
        {"goal": "dresser", "sol1": "replace it ", "sol2": "finish, with  woodgrain ", "label": 1},
        {"goal": "cut an apple", "sol1": "with a knife", "sol2": "with a spoon, slowly and often", "label": 0},
    ],
    "arc_easy_test.jsonl": [
        {
            "id": "a",
            "question": "Which is newest?",
            "choices": _choices("phone", "plane", "car", "tv"),
            "answerKey": "A",
        },
        {
            "id": "b",
            "question": "What is wet?",
            "choices": _choices("stone", "the sea at night", "dust"),
            "answerKey": "B",
        },
        {
            "id": "c",
            "question": "What is hot?",
            "choices": {"text": ["ice", "a fire"], "label": ["1", "2"]},
            "answerKey": "2",
        },
    ],
    "winogrande_xl_validation.jsonl": [
        {"sentence": "Sarah was better than Maria so _ won.", "option1": "Sarah", "option2": "Maria", "answer": "1"},
        {"sentence": "The cat saw the dog but _ ran away.", "option1": "the cat", "option2": "it", "answer": "2"},
    ],
    "boolq_validation.jsonl": [
        {"question": "is fire hot", "passage": "Fire -- Fire is hot.", "idx": 0, "label": 1},
        {"question": "is ice hot", "passage": "Ice -- Ice is cold.", "idx": 1, "label": 0},
        {"question": "is tea hot", "passage": "Tea -- Tea is a drink.", "idx": 2, "label": 1},
    ],
    "openbookqa_test.jsonl": [
        {"id": "8", "question_stem": "Sharks live in", "choices": _choices("the sea", "trees", "a"), "answerKey": "A"},
        {"id": "9", "question_stem": "Birds fly", "choices": _choices("no", "south in winter"), "answerKey": " B"},
    ],
    "social_iqa_validation.jsonl": [
        {
            "context": "Tracy went home.",
            "question": "Why?",
            "answerA": "to sleep",
            "answerB": "to go somewhere else with Riley",
            "answerC": "no",
            "label": label,
        }
        for label in ("1", "2", "3")
    ],
    "sciq_test.jsonl": [
        {
            "question": "Who thought of selection?",
            "distractor1": "Linnaeus",
            "distractor2": "shaw",
            "distractor3": "Scopes and others",
            "correct_answer": "darwin",
            "support": support,
        }
        for support in ("", " Darwin did.")
    ],
}


def write_rows(path: Path, rows: Rows) -> Path:
    """One row per line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_files(folder: Path) -> Path:
    """All eight tasks, each in the split that the harness evaluates."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in FILES.items():
        write_rows(folder / name, rows)
    return folder

"""The numbers printed in the paper, each with the config that computes it. They are in paper.yaml, as printed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

T = TypeVar("T")


class PrintedCounts(NamedTuple):
    """One row of a parameter table, as printed."""

    scale: str  # our config
    residual: str  # our config
    counts: tuple[str, ...]  # one per column


class PrintedLoss(NamedTuple):
    """One cell of a validation-loss table, as printed."""

    scale: str  # our config
    residual: str  # our config
    name: str  # the paper's name of the method
    loss: str


class PrintedScores(NamedTuple):
    """One method's row of an evaluation table, as printed: 1b with standard, attnres-block or dar-block."""

    name: str  # the paper's name of the method
    scores: tuple[str, ...]  # one per column


class PrintedSource(NamedTuple):
    """One of Paloma's sixteen sources: token perplexity of the 1B models, as printed."""

    group: str
    perplexity: tuple[str, str, str]  # by method, as in `PALOMA_METHODS`


class PrintedGap(NamedTuple):
    """One panel of the write-gate and rescue figure at 0.5B, as printed."""

    residual: str  # our config
    name: str  # the paper's name of the method
    gap: str  # mean absolute write gap
    correlation: str  # between write and rescue gaps across layers


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _rows(kind: Callable[..., T], name: str) -> tuple[T, ...]:
    return tuple(kind(*row) for row in _PRINTED[name])


_TEXT = Path(__file__).with_name("paper.yaml").read_text(encoding="utf-8")
_PRINTED = {name: _tuples(table) for name, table in yaml.load(_TEXT, yaml.BaseLoader).items()}  # numbers stay text

DENSE_COLUMNS: tuple[str, ...] = _PRINTED["dense_columns"]
DENSE_COUNTS = _rows(PrintedCounts, "dense_counts")
MOE_COLUMNS: tuple[str, ...] = _PRINTED["moe_columns"]
MOE_COUNTS = _rows(PrintedCounts, "moe_counts")
MOE_DAR_OVER_ATTNRES: str = _PRINTED["moe_dar_over_attnres"]
SIZE_SWEEP = _rows(PrintedLoss, "size_sweep")
KV_ABLATION = _rows(PrintedLoss, "kv_ablation")
PRESETS = {"size-sweep": SIZE_SWEEP, "kv-ablation": KV_ABLATION}  # for `dualres suite`
FIT_COLUMNS: tuple[str, ...] = _PRINTED["fit_columns"]
FIT = _rows(PrintedScores, "fit")
ZERO_SHOT_COLUMNS: tuple[str, ...] = _PRINTED["zero_shot_columns"]
ZERO_SHOT = _rows(PrintedScores, "zero_shot")
PALOMA_METHODS: tuple[str, ...] = _PRINTED["paloma_methods"]
PALOMA = _rows(PrintedSource, "paloma")
GATE_RESCUE = _rows(PrintedGap, "gate_rescue")

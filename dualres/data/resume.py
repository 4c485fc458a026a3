"""How far a preparation has come, stored beside its shards, and whether it may be taken up again."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dualres.data.shards import INDEX, SPLITS, TOKENIZER, Shard, Split
from dualres.util.atomic_files import LOCK, partial_of, write_json
from dualres.util.errors import DataError

PROGRESS = "progress.json"


class SourcePosition(NamedTuple):
    """How far the source was read: whole parts, and documents of the part after them."""

    part: int = 0
    documents: int = 0


@dataclass
class PrepareState:
    """What was done, in whole chunks: a shard of each split."""

    settings: dict[str, Any]  # all that decides the result
    tokenizer: str | None = None  # fingerprint of the one that made the shards
    place: SourcePosition = field(default_factory=SourcePosition)
    chunks: int = 0
    train: list[Shard] = field(default_factory=list)
    validation: list[Shard] = field(default_factory=list)

    def shards(self, split: Split) -> list[Shard]:
        """The files of one split, in order."""
        return self.train if split == "train" else self.validation

    def write(self, out: Path) -> None:
        """Store it."""
        write_json(out / PROGRESS, dataclasses.asdict(self))


def check_folder(out: Path) -> None:
    """Refuse a folder that holds something else."""
    names = {file.name for file in out.iterdir()}
    if PROGRESS not in names and names - {partial_of(out / PROGRESS).name, LOCK}:
        raise DataError(f"{out} is not empty and holds no preparation: use a new folder")


def resume_or_start(out: Path, settings: dict[str, Any]) -> PrepareState | None:
    """What an earlier run with these settings left in `out`, or a beginning; None where all is done.

    Other settings are refused, but they may change before the first shard is there.
    """
    state = _read(out, settings)
    if (out / INDEX).exists():
        return None
    if state is None:
        (out / TOKENIZER).unlink(missing_ok=True)
        state = PrepareState(settings)
        state.write(out)
    return state


def _read(out: Path, settings: dict[str, Any]) -> PrepareState | None:
    path = out / PROGRESS
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = {split: [Shard(**row) for row in data[split]] for split in SPLITS}
        state = PrepareState(**{**data, "place": SourcePosition(*data["place"]), **rows})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error!r}): remove {out} and prepare again") from None
    settings = json.loads(json.dumps(settings))
    changed = [key for key in settings if state.settings.get(key) != settings[key]]
    if not changed:
        return state
    if state.chunks == 0:
        return None
    what = ", ".join(_change(key, state.settings.get(key), settings[key]) for key in changed)
    raise DataError(f"{out} was prepared from other settings ({what}): use a new folder, or the settings it began with")


def _change(key: str, before: Any, now: Any) -> str:
    if key != "parts":
        return f"{key} {before!r} → {now!r}"
    files = sorted({name for name, _ in {*map(tuple, before)} ^ {*map(tuple, now)}})
    return f"other files or sizes in the source: {', '.join(files[:3])}{' …' if len(files) > 3 else ''}"

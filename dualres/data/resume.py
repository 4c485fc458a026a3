"""The progress of `prepare`, stored beside its shards, and whether it may resume."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dualres.data.shards import SPLITS, TOKENIZER, Shard, Split
from dualres.util.atomic_files import LOCK, partial_of, write_json
from dualres.util.errors import DataError

PROGRESS = "progress.json"


class SourcePosition(NamedTuple):
    """How far the source was read: parts, and documents of the next part."""

    part: int = 0
    documents: int = 0


@dataclass
class PrepareState:
    """What was written, in whole chunks of one shard per split."""

    settings: dict[str, Any]
    tokenizer: str | None = None  # fingerprint
    place: SourcePosition = field(default_factory=SourcePosition)
    chunks: int = 0
    train: list[Shard] = field(default_factory=list)
    validation: list[Shard] = field(default_factory=list)

    def shards(self, split: Split) -> list[Shard]:
        return self.train if split == "train" else self.validation

    def write(self, out: Path) -> None:
        write_json(out / PROGRESS, dataclasses.asdict(self))


def check_folder(out: Path) -> None:
    names = {file.name for file in out.iterdir()}
    if PROGRESS not in names and names - {partial_of(out / PROGRESS).name, LOCK}:
        raise DataError(f"{out} is not empty, and not from `dualres prepare`: use a new folder")


def resume_or_start(out: Path, settings: dict[str, Any]) -> PrepareState:
    """The state that an earlier run with these settings left in `out`, or a new one.

    Settings may change only before the first shard is written.
    """
    settings = json.loads(json.dumps(settings))
    if (out / PROGRESS).exists():
        state = _read(out)
        changed = [key for key in settings if state.settings.get(key) != settings[key]]
        if not changed:
            return state
        if state.chunks > 0:
            what = ", ".join(_change(key, state.settings.get(key), settings[key]) for key in changed)
            raise DataError(f"{out} was prepared with other settings ({what}): use a new folder, or the same settings")
    (out / TOKENIZER).unlink(missing_ok=True)
    state = PrepareState(settings)
    state.write(out)
    return state


def _read(out: Path) -> PrepareState:
    path = out / PROGRESS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rows = {split: [Shard(**row) for row in data[split]] for split in SPLITS}
        return PrepareState(**{**data, "place": SourcePosition(*data["place"]), **rows})
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error!r}): remove {out} and prepare again") from None


def _change(key: str, before: Any, now: Any) -> str:
    if key != "parts":
        return f"{key} {before!r} → {now!r}"
    files = sorted({name for name, _ in {*map(tuple, before)} ^ {*map(tuple, now)}})
    return f"files or sizes in the source have changed: {', '.join(files[:3])}{' …' if len(files) > 3 else ''}"

"""Results that are kept: each piece is written as soon as it is measured, and is not measured again.

A piece is found by its key: the model's identity and all that decides the number. A changed model or changed data has
another key, and is measured anew.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dualres.util.atomic_files import write_json

FOLDER = "kept"
PROTOCOL = 1  # of our own measuring: another number makes all that was kept stale


class Piece(NamedTuple):
    """Something to measure."""

    title: str  # names the file and the lines of progress
    key: Mapping[str, Any]  # all that decides the result, for JSON
    measure: Callable[[], Any]
    as_data: Callable[[Any], Mapping[str, Any]]  # the result, for JSON
    from_data: Callable[[Mapping[str, Any]], Any]


def read(out: Path, piece: Piece, say: Callable[[str], None]) -> Any | None:
    """The result that was kept under `out`, or None where there is none, or none that can be trusted."""
    path = path_of(out, piece)
    try:
        found = json.loads(path.read_bytes())
        if found["key"] != _key(piece) or found["checksum"] != _checksum(found["result"]):
            raise ValueError("it is not what was written")
        return piece.from_data(found["result"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        say(f"{path} is damaged ({error}), so {piece.title} is measured anew")
        return None


def write(out: Path, piece: Piece, result: Any) -> None:
    """Keep a result under `out`."""
    path = path_of(out, piece)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = json.loads(json.dumps(piece.as_data(result)))
    write_json(path, {"key": _key(piece), "checksum": _checksum(data), "result": data})


def path_of(out: Path, piece: Piece) -> Path:
    """Where a piece is kept: its title, for people, and a hash of its key."""
    title = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in piece.title)
    return out / FOLDER / f"{title[:80]}-{_checksum(_key(piece))[:16]}.json"


def _key(piece: Piece) -> Any:
    return json.loads(json.dumps({"protocol": PROTOCOL, **piece.key}))  # as it is read back: no tuples


def _checksum(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

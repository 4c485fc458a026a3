"""Results cached on disk: each is written as soon as it is measured, and not measured again.

The key of a result has the model's identity and everything else that determines the number, so a changed model or
changed data has a different key.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dualres.util.atomic_files import write_json

FOLDER = "cache"
PROTOCOL = 1  # increment it when the way of measuring changes: all cached results become stale


class Measurement(NamedTuple):
    """A measurement to run; its result is a NamedTuple."""

    title: str  # in file names and progress lines
    key: Mapping[str, Any]  # everything that determines the result, for JSON
    run: Callable[[], Any]
    from_data: Callable[[Mapping[str, Any]], Any]  # builds the result from the fields in the file


def read(out: Path, measurement: Measurement, say: Callable[[str], None]) -> Any | None:
    """The result cached in `out`; None if there is none, or if the file is damaged."""
    path = path_of(out, measurement)
    try:
        cached = json.loads(path.read_bytes())
        if cached["key"] != _key(measurement) or cached["checksum"] != _checksum(cached["result"]):
            raise ValueError("wrong key or checksum")
        return measurement.from_data(cached["result"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        say(f"{path} is damaged ({error}): measuring {measurement.title} again")
        return None


def write(out: Path, measurement: Measurement, result: Any) -> None:
    path = path_of(out, measurement)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = result._asdict()
    write_json(path, {"key": _key(measurement), "checksum": _checksum(data), "result": data})


def path_of(out: Path, measurement: Measurement) -> Path:
    """A file name with the title, for people, and a hash of the key."""
    title = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in measurement.title)
    return out / FOLDER / f"{title[:80]}-{_checksum(_key(measurement))[:16]}.json"


def _key(measurement: Measurement) -> Any:
    return json.loads(json.dumps({"protocol": PROTOCOL, **measurement.key}))  # as it is read back: no tuples


def _checksum(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

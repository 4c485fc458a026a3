"""Is preparation limited by the tokenizer? Compares `prepare` with `tokenizers`' batch encoding, same text and cores.

    python benchmarks/prepare.py                       # Python's standard library, a BPE of 4,096 entries
    python benchmarks/prepare.py corpus.jsonl --tokenizer tokenizer.json --json

Each round runs both, in alternating order. `prepare` reads the file, tokenizes, and writes checked shards to the disk;
`tokenizers` only encodes documents that are already in memory. Prints MB of UTF-8 text per second, the ratio of each
round, and the same ratio by processor time, which other work on the machine disturbs less.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dualres.data import tokenizer as tokenizers
from dualres.data.prepare import Settings, prepare
from dualres.data.source import PYTHON, open_source
from dualres.util.tables import table

ENTRIES = 4096
TOGETHER = 1000  # documents in one call of encode_batch_fast


class Seconds(NamedTuple):
    """Wall-clock time, and CPU time of all cores."""

    wall: float
    processor: float


def main() -> None:
    """Measure, then print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", nargs="?", default=PYTHON, help="text, JSONL or Parquet (default: python)")
    parser.add_argument("--tokenizer", type=Path, help=f"a tokenizer.json (default: a BPE of {ENTRIES} entries)")
    parser.add_argument("--field", default="text")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    texts = [text for part in open_source(arguments.source, arguments.field) for text in part.documents() if text]
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        times = measure(texts, Path(folder), arguments)
    rounds = list(zip(*times.values(), strict=True))  # of prepare and encode_batch_fast
    speeds = {name: [megabytes / one.wall for one in of_one] for name, of_one in times.items()}
    ratios = {
        "ratio": [theirs.wall / ours.wall for ours, theirs in rounds],
        "ratio by processor time": [theirs.processor / ours.processor for ours, theirs in rounds],
    }
    if arguments.json:
        found = {"source": arguments.source, "megabytes": megabytes, "documents": len(texts), "cores": os.cpu_count()}
        print(json.dumps({**found, "load": os.getloadavg()[0], "mb_per_second": speeds} | ratios))
        return
    rows = [[name, *spread(values)] for name, values in (speeds | ratios).items()]
    print(f"{len(texts):,} documents, {megabytes:.1f} MB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(table([f"MB/s, {arguments.rounds} rounds", "median", "min", "max"], rows))


def measure(texts: Sequence[str], folder: Path, arguments: argparse.Namespace) -> dict[str, list[Seconds]]:
    """Times of each round, `prepare` first."""
    source, path = arguments.source, arguments.tokenizer
    if source == PYTHON:
        source = str(folder / "python.jsonl")
        Path(source).write_text("".join(json.dumps({arguments.field: text}) + "\n" for text in texts))
    if path is None:
        path = folder / "tokenizer.json"
        tokenizers.train_bpe(iter(texts), ENTRIES).save(path)
    backend = tokenizers.load(path).backend
    settings = Settings(source, str(path), field=arguments.field)
    outs = (folder / f"out{number}" for number in range(arguments.rounds + 1))

    def encode() -> None:
        for start in range(0, len(texts), TOGETHER):
            backend.encode_batch_fast(texts[start : start + TOGETHER], add_special_tokens=False)

    works: dict[str, Callable[[], object]] = {
        "prepare": lambda: prepare(settings, next(outs)),
        "encode_batch_fast": encode,
    }
    times: dict[str, list[Seconds]] = {name: [] for name in works}
    for turn in range(arguments.rounds + 1):  # the first warms up
        for name in sorted(works, reverse=turn % 2 == 0):
            began = now()
            works[name]()
            done = now()
            if turn:
                times[name].append(Seconds(done.wall - began.wall, done.processor - began.processor))
    return times


def now() -> Seconds:
    """The current wall-clock and CPU time."""
    return Seconds(time.perf_counter(), time.process_time())


def spread(values: Sequence[float]) -> list[str]:
    """Median, minimum and maximum."""
    return [f"{value:.2f}" for value in (statistics.median(values), min(values), max(values))]


if __name__ == "__main__":
    main()

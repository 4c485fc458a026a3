"""Documents for tests, written in every format, and preparations in processes of their own, which may be killed."""

import gzip
import json
import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from dualres.cli import main
from dualres.data.prepare import Settings, prepare
from dualres.data.shards import read_index, read_tokenizer

ODD = {
    "empty": "",
    "emoji": "👩‍🚀🏽 naïve café – ﷽ 𝔘𝔫𝔦 日本語のテキスト العربية हिन्दी",
    "nul": "a\0b\0\0",
    "crlf": "one\r\ntwo\r\n\r\nthree\rfour\n",
    "not lines": "next\x85line\u2028separator\u2029\x0b\x0c\x1c\x1e",
    "spaces": "   \t\t a  b   c\n\n\n   \n\t",
    "bom": "\ufeffx\ufeff",
    "noncharacters": "\uffff\U0010ffff\ufffd\x7f\x80\xa0\xad",
    "combining": "e\u0301 a\u0308\u0304 \u0301alone",
    "special tokens": "a <|endoftext|> b </s><s><unk> [INST]<SPECIAL_20> c",
    "digits": "1234567890123 3.14159 0x7f ½ ²",
    "long word": "a" * 300 + "ß" * 30,
}
ALL_ODD = "\n".join(ODD.values())


def document(number: int) -> str:
    """Odd text with blank lines, then one line beyond 16,000 characters and a blank line, so a .txt is cut there."""
    return f"document {number}\n{ALL_ODD}\n{f'word {number} ' * 2300}\n\n"


DOCUMENTS = [document(number) for number in range(7)]


def write_text(path: Path, texts: Sequence[str]) -> None:
    path.write_bytes("".join(texts).encode())


def write_jsonl(path: Path, texts: Sequence[str]) -> None:
    """Every other row with characters as they are; a blank line, which means nothing."""
    rows = [json.dumps({"id": i, "text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    path.write_bytes("\n\n".join(rows).encode())


def write_parquet(path: Path, texts: Sequence[str]) -> None:
    """FineWeb-Edu's columns, in several row groups."""
    count = len(texts)
    table = pyarrow.table(
        {
            "text": texts,
            "id": [f"<urn:uuid:{i}>" for i in range(count)],
            "dump": ["CC-MAIN-2024-10"] * count,
            "url": [f"https://example.org/{i}" for i in range(count)],
            "date": ["2024-02-21T00:00:00Z"] * count,
            "file_path": ["s3://commoncrawl/part"] * count,
            "language": ["en"] * count,
            "language_score": [0.9] * count,
            "token_count": [len(text) // 4 for text in texts],
            "score": [3.1] * count,
            "int_score": [3] * count,
        }
    )
    pyarrow.parquet.write_table(table, path, row_group_size=3)


def gzipped(data: bytes) -> bytes:
    """In two members, as `cat a.gz b.gz` makes them."""
    middle = len(data) // 2
    return gzip.compress(data[:middle]) + gzip.compress(data[middle:])


def zstandard(data: bytes) -> bytes:
    """In two frames, as `cat a.zst b.zst` makes them."""
    codec, middle = pyarrow.Codec("zstd"), len(data) // 2
    return codec.compress(data[:middle], asbytes=True) + codec.compress(data[middle:], asbytes=True)


WRITERS: dict[str, Callable[[Path, Sequence[str]], None]] = {
    ".txt": write_text,
    ".jsonl": write_jsonl,
    ".json": write_jsonl,
    ".parquet": write_parquet,
}
COMPRESSIONS = {".gz": gzipped, ".zst": zstandard}
SUFFIXES = [*WRITERS, ".txt.gz", ".txt.zst", ".jsonl.gz", ".jsonl.zst", ".json.gz"]


def write(path: Path, texts: Sequence[str]) -> Path:
    """In the format and compression that the name says."""
    compress = COMPRESSIONS.get(path.suffix)
    WRITERS[Path(path.stem).suffix if compress else path.suffix](path, texts)
    if compress:
        path.write_bytes(compress(path.read_bytes()))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


PROCESSES = multiprocessing.get_context("forkserver")  # forks of one that has imported everything, but run nothing
PROCESSES.set_forkserver_preload(["pytest", "tests.data.corpus"])


def run(target: Callable[..., None], *arguments: Any) -> int | None:
    """In a process of its own. -> its exit code, −9 if it was killed"""
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def command(arguments: list[str], said: Path, environment: dict[str, str]) -> None:
    """The command line; what it writes to standard error goes to the file `said`."""
    os.environ.update(environment)
    with said.open("w") as sys.stderr:
        code = main(arguments)
    sys.exit(code)


def prepare_and_die(settings: Settings, out: Path, moment: int) -> None:
    """Kill this process just before it changes the folder for the `moment`-th time; 0 is the first."""
    left = moment

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event in ("os.rename", "os.remove") or (event == "open" and str(arguments[1]).startswith("w")):
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(watch)
    prepare(settings, out)


def memory_of_prepare(settings: Settings, out: Path, answer: Path) -> None:
    """Write by how many bytes the most memory of this process grows."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    prepare(settings, out)
    answer.write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024))


def settings(folder: Path, **changes: Any) -> Settings:
    """A chunk has three documents."""
    return Settings(
        **{"source": str(folder), "tokenizer": "bpe:300", "held_out": 0.3, "shard_tokens": 12_000, **changes}
    )


def texts(folder: Path, split: str) -> list[str]:
    """The documents of a split, in order."""
    index = read_index(folder)
    tokenizer = read_tokenizer(folder, index)
    found = []
    for shard in index.train if split == "train" else index.validation:
        tokens = np.fromfile(folder / shard.file, np.dtype(index.dtype).newbyteorder("<"))
        ends = np.flatnonzero(tokens == index.end_of_text) + 1
        found += [tokenizer.decode(text) for text in np.split(tokens, ends)[:-1]]
    return found

"""`dualres prepare`: from text to token shards."""

import argparse
import time
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.data.prepare import Report, Settings, prepare
from dualres.data.shards import Index
from dualres.util.progress import Progress, duration, short


def add(commands: Any) -> None:
    """Declare it."""
    defaults = Settings("", "")
    sub = arguments.command(
        commands,
        "prepare",
        "turn text into token shards",
        "Read documents from SOURCE, tokenize them on all cores, and write shards with an index to OUT.\n"
        "Interrupted, the same command goes on where it stopped; finished, it changes nothing.",
        "sources:\n"
        "  python           documentation and source of Python's standard library: no network, no file\n"
        "  FILE or FOLDER   .txt, .jsonl and .parquet; .txt and .jsonl also as .gz or .zst. A .txt is cut at blank\n"
        "                   lines into documents of about 16,000 characters; of the others each row is one\n"
        "  OWNER/NAME       a Hugging Face dataset, streamed: HuggingFaceFW/fineweb-edu --subset sample-10BT\n"
        "tokenizers:\n"
        "  bpe:4096         a byte-level BPE of 4,096 entries, trained on the first 64 MiB of SOURCE\n"
        "  bytes            256 bytes and the end of a text\n"
        "  tekken           131,072 entries, the paper's vocabulary size (pip install -e '.[data]')\n"
        "  PATH             any tokenizer.json\n\n"
        "examples:\n"
        "  dualres prepare python data/python\n"
        "  dualres prepare fineweb-edu/sample/10BT data/fineweb --tokenizer tekken --held-out 0.002",
    )
    sub.add_argument("source", metavar="SOURCE", help="where the documents are")
    sub.add_argument("out", metavar="OUT", type=Path, help="the folder to write; new, or begun by the same command")
    sub.add_argument("--tokenizer", metavar="T", default="bpe:4096", help="default bpe:4096")
    sub.add_argument("--field", metavar="KEY", default=defaults.field, help="key or column of the text (default text)")
    sub.add_argument("--subset", metavar="S", help="of a Hugging Face dataset")
    sub.add_argument("--split", metavar="S", default=defaults.split, help="of a Hugging Face dataset (default train)")
    sub.add_argument("--end-of-text", metavar="TOKEN", help="the token that ends a document, for a tokenizer.json")
    sub.add_argument(
        "--held-out",
        metavar="SHARE",
        type=float,
        default=defaults.held_out,
        help=f"share of the documents for validation, chosen by a hash of their text (default {defaults.held_out})",
    )
    sub.add_argument(
        "--shard-tokens",
        metavar="N",
        type=int,
        default=defaults.shard_tokens,
        help="tokens of a shard, also how much an interruption costs at most (default 100 million)",
    )
    sub.set_defaults(command=_prepare)


def _prepare(given: argparse.Namespace) -> int:
    settings = Settings(
        given.source,
        given.tokenizer,
        given.field,
        given.subset,
        given.split,
        given.end_of_text,
        given.held_out,
        given.shard_tokens,
    )
    index = prepare_with_progress(settings, given.out)
    for split in ("train", "validation"):
        parts = index.shards(split)
        print(f"{split:10}  {index.tokens(split):>15,} tokens  {sum(s.documents for s in parts):>11,} documents")
    print(f"vocabulary  {index.vocab_size:,}; written to {given.out}")
    return 0


def prepare_with_progress(settings: Settings, out: Path) -> Index:
    """`prepare` with a line that shows how far it is."""
    progress, stage, began = Progress(), "", 0.0

    def show(report: Report) -> None:
        nonlocal stage, began
        if report.stage != stage:
            stage, began = report.stage, time.monotonic()
        seconds = max(time.monotonic() - began, 1e-9)
        progress.show(
            f"{stage}: {report.part} ({report.parts_done + 1}/{report.parts})  {report.documents:,} documents  "
            f"{short(report.tokens)} tokens  {short(report.characters / seconds)} characters/s  {duration(seconds)}"
        )

    try:
        return prepare(settings, out, show)
    finally:
        progress.end()

"""Turn text into token shards.

Read documents from SOURCE, tokenize them on all cores, and write shards with an index to OUT.
Rerun the command to resume after an interruption; once finished, it changes nothing.
"""

import argparse
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from dualres.data.settings import Settings
from dualres.util.optional_dependencies import install
from dualres.util.progress import Progress

if TYPE_CHECKING:
    from dualres.data.shards import Index

EPILOG = f"""\
sources:
  python           documentation and source of Python's standard library: needs no network and no files
  FILE or FOLDER   .txt, .jsonl (or .json, one object per line), .parquet; all but .parquet also as .gz or
                   .zst. A .txt is split at blank lines into documents of about 16,000 characters; the
                   others have one document per row
  OWNER/NAME       a Hugging Face dataset, streamed: HuggingFaceFW/fineweb-edu --subset sample-10BT
tokenizers:
  bpe:4096         a byte-level BPE with 4,096 tokens, trained on the first 64 MiB of SOURCE
  bytes            256 bytes and end of text
  tekken           131,072 tokens, the paper's vocabulary size ({install("data")})
  PATH             any tokenizer.json

examples:
  dualres prepare python data/python
  dualres prepare fineweb-edu/sample/10BT data/fineweb --tokenizer tekken --held-out 0.002
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    defaults = Settings("", "")
    add("source", metavar="SOURCE", help="the documents, see below")
    add("out", metavar="OUT", type=Path, help="output folder: new, or from an interrupted run of the same command")
    add("--tokenizer", metavar="T", default="bpe:4096", help="tokenizer, see below (default bpe:4096)")
    add("--field", metavar="KEY", default=defaults.field, help="key or column of the text (default text)")
    add("--subset", metavar="S", help="subset of a Hugging Face dataset")
    add("--split", metavar="S", default=defaults.split, help="split of the dataset (default train)")
    add("--end-of-text", metavar="TOKEN", help="the end-of-text token of a tokenizer.json")
    add(
        "--held-out",
        metavar="FRACTION",
        type=float,
        default=defaults.held_out,
        help=f"fraction of the documents for validation, chosen by a hash of their text (default {defaults.held_out})",
    )
    add(
        "--shard-tokens",
        metavar="N",
        type=int,
        default=defaults.shard_tokens,
        help="tokens per shard, also the maximum work lost if interrupted (default 100 million)",
    )


def run(args: argparse.Namespace) -> int:
    settings = Settings(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Settings)})
    progress = Progress(args.verbosity)
    index = prepare_with_progress(settings, args.out, progress)
    for split in ("train", "validation"):
        documents = sum(shard.documents for shard in index.shards(split))
        print(f"{split:10}  {index.tokens(split):>15,} tokens  {documents:>11,} documents")
    print(f"vocabulary  {index.vocab_size:,}; wrote {args.out}")
    if not index.validation:
        progress.warn(
            "dualres: the validation split is empty, and `dualres train` needs one: prepare a new folder with a larger "
            f"--held-out than {args.held_out:g}, or more documents"
        )
    return 0


def prepare_with_progress(settings: Settings, out: Path, progress: Progress) -> "Index":
    from dualres.data.prepare import prepare

    try:
        return prepare(settings, out, progress.show)
    finally:
        progress.end()

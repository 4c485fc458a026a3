"""Write a trained model as a Hugging Face folder, or as a Llama checkpoint.

Write MODEL, a run folder or a saved dualres model, to OUT: weights in safetensors, config, tokenizer, model
card, and the code that loads it where dualres is not installed.
"""

import argparse
from pathlib import Path

from dualres.commands import arguments

EPILOG = """\
examples:
  dualres export runs/nano-dar-block models/nano-dar
  dualres export runs/nano-standard models/nano-llama --form llama
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="folder of a run, or of a saved dualres model")
    add("out", metavar="OUT", type=Path, help="new folder to write")
    add(
        "--form",
        choices=("dualres", "llama"),
        default="dualres",
        help="llama: a `standard` model as a plain Llama checkpoint, without dualres code (default dualres)",
    )
    arguments.add_checkpoint(parser)
    arguments.add_plugin(parser)
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype of the weights (default auto: unchanged)",
    )


def run(args: argparse.Namespace) -> int:
    from dualres.hub.export import export

    model = export(args.model, args.out, form=args.form, checkpoint=args.checkpoint, dtype=args.dtype)
    print(f"wrote {args.out}: {model.name} ({model.decoder.residual_config.method})")
    return 0

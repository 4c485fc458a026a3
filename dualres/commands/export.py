"""`dualres export`: write a trained model as a Hugging Face folder."""

import argparse
from pathlib import Path
from typing import Any

from dualres.commands import arguments


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "export",
        "write a trained model as a Hugging Face folder, or as a Llama checkpoint",
        "Write the model of MODEL, a run's folder or a saved dualres model, to OUT: weights in safetensors, config,\n"
        "tokenizer, model card, and the code that loads it where dualres is not installed.",
        "examples:\n"
        "  dualres export runs/nano-dar-block models/nano-dar\n"
        "  dualres export runs/nano-standard models/nano-llama --form llama",
    )
    sub.add_argument("model", metavar="MODEL", type=Path, help="folder of a run, or of a saved dualres model")
    sub.add_argument("out", metavar="OUT", type=Path, help="the folder to write; new")
    sub.add_argument(
        "--form",
        choices=("dualres", "llama"),
        default="dualres",
        help="llama: a `standard` model as a plain checkpoint that needs no code of ours (default dualres)",
    )
    arguments.checkpoint(sub)
    sub.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="of the weights (default auto: as they are)",
    )
    sub.set_defaults(command=_export)


def _export(given: argparse.Namespace) -> int:
    arguments.hush()
    from dualres.hub.export import export

    model = export(given.model, given.out, form=given.form, checkpoint=given.checkpoint, dtype=given.dtype)
    print(f"{model.name} ({model.decoder.residual_config.method}) is written to {given.out}")
    return 0

"""`dualres export`, `import` and `convert`: models between runs, Hugging Face folders and Llama's family."""

import argparse
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.config.loading import names
from dualres.config.schema import ConfigError
from dualres.util.progress import Progress


def add(commands: Any) -> None:
    """Declare all three."""
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
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of the weights (default: as they are)"
    )
    sub.set_defaults(command=_export)

    sub = arguments.command(
        commands,
        "import",
        "make a run's folder of an exported one",
        "The inverse of export: write the model of FOLDER, which `dualres export` made of a run, to RUN as that run\n"
        "with one checkpoint, its weights and no optimizer state.\n"
        "To train on from it: dualres train SCALE RESIDUAL --from FOLDER",
        "example:\n  dualres import models/nano-dar runs/nano-dar-again",
    )
    sub.add_argument("folder", metavar="FOLDER", type=Path, help="an exported model")
    sub.add_argument("run", metavar="RUN", type=Path, help="the folder to write; new")
    sub.set_defaults(command=_import)

    sub = arguments.command(
        commands,
        "convert",
        "put a pretrained Llama, Mistral or Qwen on another residual pathway, losing nothing",
        "Write the checkpoint SOURCE to OUT as a dualres model on --residual whose outputs equal the source's,\n"
        "ready to be trained on: with `dualres train SCALE RESIDUAL --from OUT`, or with transformers' Trainer.\n"
        "Llama, Mistral, Qwen2 and Qwen3; what does not fit is refused by name.",
        f"residuals:  {', '.join(names('residual'))}\n\n"
        "examples:\n"
        "  dualres convert models/llama-1b models/llama-1b-dar --residual dar-block\n"
        "  dualres convert Qwen/Qwen3-0.6B models/qwen-dar --residual dar-block --set residual.branches_per_block=8",
    )
    sub.add_argument("source", metavar="SOURCE", help="folder of a checkpoint, or its name on the Hugging Face hub")
    sub.add_argument("out", metavar="OUT", type=Path, help="the folder to write; new")
    sub.add_argument("--residual", metavar="R", required=True, help="a residual by name, or the path of a YAML file")
    arguments.overrides(sub)
    sub.add_argument("--seed", metavar="N", type=int, default=42, help="of the pathway's own weights (default 42)")
    sub.add_argument(
        "--no-check", action="store_true", help="do not compare with the source, which needs memory for both in float32"
    )
    sub.set_defaults(command=_convert)


def _export(given: argparse.Namespace) -> int:
    arguments.hush()
    from dualres.hub.export import export

    opened = export(given.model, given.out, form=given.form, checkpoint=given.checkpoint, dtype=given.dtype or "auto")
    print(f"{opened.name} ({opened.decoder.residual_config.method}) is written to {given.out}")
    return 0


def _import(given: argparse.Namespace) -> int:
    arguments.hush()
    from dualres.hub.export import import_run

    import_run(given.folder, given.run)
    print(f"{given.folder} is written to {given.run} as a run")
    return 0


def _convert(given: argparse.Namespace) -> int:
    arguments.hush()
    from dualres.hub.convert import convert

    if not 0 <= given.seed < 2**63:
        raise ConfigError(f"--seed {given.seed}: use a number from 0 up to 2^63")
    progress = Progress()
    made = convert(
        given.source,
        given.out,
        given.residual,
        given.set,
        seed=given.seed,
        check=not given.no_check,
        show=progress.show,
    )
    progress.end()
    if made.difference is None:
        print(f"{given.source} is written to {given.out} on {given.residual}; not compared with the source")
    else:
        print(
            f"{given.source} is written to {given.out} on {given.residual}; its logits differ from the source's by "
            f"{made.difference:.1e}, relative, in float32"
        )
    return 0

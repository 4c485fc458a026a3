"""`dualres convert`: put a pretrained checkpoint on another residual pathway."""

import argparse
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.config.loading import names
from dualres.config.schema import ConfigError
from dualres.util.progress import Progress


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "convert",
        "put a pretrained Llama, Mistral or Qwen on another residual pathway, with unchanged outputs",
        "Write the checkpoint SOURCE to OUT as a dualres model on --residual whose outputs equal the source's,\n"
        "ready for further training: with `dualres train SCALE RESIDUAL --from OUT`, or with transformers' Trainer.\n"
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
        "--no-check", action="store_true", help="skip the comparison with the source, which holds both in float32"
    )
    sub.set_defaults(command=_convert)


def _convert(given: argparse.Namespace) -> int:
    if not 0 <= given.seed < 2**63:
        raise ConfigError(f"--seed {given.seed}: use a number from 0 up to 2^63")
    arguments.hush()
    from dualres.hub.convert import convert

    progress = Progress()
    converted = convert(
        given.source,
        given.out,
        given.residual,
        given.set,
        seed=given.seed,
        check=not given.no_check,
        show=progress.show,
    )
    progress.end()
    compared = (
        "not compared with the source"
        if converted.difference is None
        else f"its logits differ from the source's by {converted.difference:.1e}, relative, in float32"
    )
    print(f"{given.source} is written to {given.out} on {given.residual}; {compared}")
    return 0

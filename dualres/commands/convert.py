"""Put a pretrained Llama, Mistral or Qwen on another residual pathway, with unchanged outputs.

Write the checkpoint SOURCE to OUT as a dualres model on --residual whose outputs equal the source's,
ready for further training: with `dualres train SCALE RESIDUAL --from OUT`, or with transformers' Trainer.
Llama, Mistral, Qwen2 and Qwen3; what does not fit is refused by name.
"""

import argparse
from pathlib import Path

from dualres.commands import arguments
from dualres.config.loading import names
from dualres.util.progress import Progress

EPILOG = f"""\
residuals:  {", ".join(names("residual"))}

examples:
  dualres convert models/llama-1b models/llama-1b-dar --residual dar-block
  dualres convert Qwen/Qwen3-0.6B models/qwen-dar --residual dar-block --set residual.branches_per_block=8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="folder of a checkpoint, or its name on the Hugging Face Hub")
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; new")
    parser.add_argument("--residual", metavar="R", required=True, help="name of a residual, or path to a YAML file")
    arguments.add_overrides(parser)
    parser.add_argument("--seed", metavar="N", type=int, default=42, help="of the pathway's own weights (default 42)")
    parser.add_argument(
        "--no-check", action="store_true", help="skip the comparison with the source, which holds both in float32"
    )


def run(given: argparse.Namespace) -> int:
    arguments.check_seed(given)
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

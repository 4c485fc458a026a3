"""Convert a pretrained Llama, Mistral or Qwen to another residual pathway, with unchanged outputs.

Write the checkpoint SOURCE to OUT as a dualres model with the pathway --residual and unchanged outputs.
Train it further with `dualres train SCALE RESIDUAL --from OUT`, or with transformers' Trainer. Supports
Llama, Mistral, Qwen2 and Qwen3; unsupported features are rejected with an error that names them.
"""

import argparse
from pathlib import Path

from dualres.commands import arguments
from dualres.util.progress import Progress

EPILOG = f"""\
{arguments.RESIDUALS}
examples:
  dualres convert models/llama-1b models/llama-1b-dar --residual dar-block
  dualres convert Qwen/Qwen3-0.6B models/qwen-dar --residual dar-block --set residual.branches_per_block=8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="SOURCE", help="folder of a checkpoint, or its name on the Hugging Face Hub")
    add("out", metavar="OUT", type=Path, help="new folder to write")
    add("--residual", metavar="R", required=True, help="name of a residual, or path to a YAML file")
    arguments.add_overrides(parser)
    arguments.add_plugin(parser)
    add("--seed", metavar="N", type=int, default=42, help="for the pathway's new weights (default 42)")
    add("--no-check", action="store_true", help="skip the comparison with the source (it loads both models in float32)")


def run(args: argparse.Namespace) -> int:
    arguments.check_seed(args)
    from dualres.hub.convert import convert

    progress = Progress(args.verbosity)
    difference = convert(
        args.source,
        args.out,
        args.residual,
        args.set,
        seed=args.seed,
        check=not args.no_check,
        show=progress.show,
    ).difference
    progress.end()
    comparison = "not compared with the source"
    if difference is not None:
        comparison = f"relative logit difference {difference:.1e} (float32)"
    print(f"wrote {args.out}: {args.source} converted to {args.residual}; {comparison}")
    return 0

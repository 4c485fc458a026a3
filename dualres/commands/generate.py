"""Continue a prompt with a trained model.

Load a run's checkpoint or an exported model, and continue PROMPT until the text ends or --tokens are generated.
"""

import argparse
from pathlib import Path

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.util.progress import Progress

EPILOG = 'example:\n  dualres generate runs/nano-dar-block "def main(" --temperature 0.8'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", type=Path, help="folder of a run, or of an exported model")
    add("prompt", metavar="PROMPT", help="text to continue; empty to start a document")
    add("--tokens", metavar="N", type=int, default=100, help="maximum new tokens (default 100)")
    add("--temperature", metavar="T", type=float, default=0.8, help="0 is greedy decoding (default 0.8)")
    add("--seed", metavar="N", type=int, default=0, help="sampling seed (default 0)")
    arguments.add_checkpoint(parser)
    arguments.add_plugin(parser)


def run(args: argparse.Namespace) -> int:
    arguments.check_positive(args, "tokens")
    arguments.check_seed(args)
    if args.temperature != 0 and not 1e-3 <= args.temperature <= 1e3:
        raise ConfigError(f"--temperature {args.temperature}: use 0 for greedy decoding, or 0.001 to 1000")
    try:
        args.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not valid UTF-8 at character {error.start}: encode it as UTF-8") from None
    from dualres.hub.open_model import open_model
    from dualres.ops import dispatch

    model = open_model(args.model, checkpoint=args.checkpoint)
    dispatch.announce(model.device, Progress(args.verbosity).say)
    print(model.sample(args.prompt, args.tokens, args.temperature, args.seed))
    return 0

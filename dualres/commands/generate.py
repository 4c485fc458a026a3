"""Continue a prompt with a trained model.

Load a run's checkpoint, or an exported model, and continue PROMPT until the text ends or has --tokens more.
"""

import argparse
import itertools
from pathlib import Path

from dualres.commands import arguments
from dualres.config.schema import ConfigError

EPILOG = 'example:\n  dualres generate runs/nano-dar-block "def main(" --temperature 0.8'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=Path, help="folder of a run, or of an exported model")
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; empty to begin a document")
    parser.add_argument("--tokens", metavar="N", type=int, default=100, help="at most this many (default 100)")
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling (default 0)")
    arguments.add_checkpoint(parser)


def run(given: argparse.Namespace) -> int:
    arguments.check_positive(given, "tokens")
    arguments.check_seed(given)
    if given.temperature != 0 and not 1e-3 <= given.temperature <= 1e3:
        raise ConfigError(f"--temperature {given.temperature}: use 0 for the likeliest token, or 0.001 to 1000")
    try:
        given.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 at character {error.start}: write it in UTF-8") from None
    import torch

    from dualres.hub.open_model import open_model
    from dualres.model.generation import generate

    model = open_model(given.model, checkpoint=given.checkpoint)
    prompt = model.encode(given.prompt)
    generator = torch.Generator().manual_seed(given.seed)
    [tokens] = generate(model.decoder, [prompt], given.tokens, temperature=given.temperature, generator=generator)
    continuation = itertools.takewhile(lambda token: token not in model.ends, tokens)
    print(model.decode([*prompt, *continuation]))
    return 0

"""`dualres generate`: continue a prompt with a trained model."""

import argparse
import itertools
from pathlib import Path
from typing import Any

from dualres.commands import arguments
from dualres.config.schema import ConfigError


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "generate",
        "continue a prompt with a trained model",
        "Load a run's checkpoint, or an exported model, and continue PROMPT until the text ends or --tokens are there.",
        'example:\n  dualres generate runs/nano-dar-block "def main(" --temperature 0.8',
    )
    sub.add_argument("model", metavar="MODEL", type=Path, help="folder of a run, or of an exported model")
    sub.add_argument("prompt", metavar="PROMPT", help="text to continue; empty to begin a document")
    sub.add_argument("--tokens", metavar="N", type=int, default=100, help="at most this many (default 100)")
    sub.add_argument(
        "--temperature", metavar="T", type=float, default=0.8, help="0 takes the likeliest token (default 0.8)"
    )
    sub.add_argument("--seed", metavar="N", type=int, default=0, help="of the sampling (default 0)")
    arguments.checkpoint(sub)
    sub.set_defaults(command=_generate)


def check(given: argparse.Namespace) -> None:
    """Refuse options out of range."""
    if given.tokens < 1:
        raise ConfigError(f"--tokens {given.tokens} is not positive: use 1 or more")
    if given.temperature != 0 and not 1e-3 <= given.temperature <= 1e3:
        raise ConfigError(f"--temperature {given.temperature}: use 0 for the likeliest token, or 0.001 to 1000")
    if not 0 <= given.seed < 2**63:
        raise ConfigError(f"--seed {given.seed}: use a number from 0 up to 2^63")
    try:
        given.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 at character {error.start}: write it in UTF-8") from None


def _generate(given: argparse.Namespace) -> int:
    check(given)
    import torch

    from dualres.hub.open_model import open_model
    from dualres.model.generation import generate
    from dualres.train.run_folder import is_run

    if not is_run(given.model):
        arguments.hush()
    model = open_model(given.model, checkpoint=given.checkpoint)
    prompt = model.encode(given.prompt)
    generator = torch.Generator().manual_seed(given.seed)
    [tokens] = generate(model.decoder, [prompt], given.tokens, temperature=given.temperature, generator=generator)
    continuation = itertools.takewhile(lambda token: token not in model.ends, tokens)
    print(model.decode([*prompt, *continuation]))
    return 0

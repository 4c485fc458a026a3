"""A trained model from its run's folder."""

import json
from pathlib import Path
from typing import NamedTuple

from dualres.data import tokenizer as tokenizers
from dualres.data.shards import TOKENIZER
from dualres.data.tokenizer import Tokenizer
from dualres.model.decoder import Decoder, build_decoder
from dualres.train import checkpoint, run_folder
from dualres.util.errors import TrainError

CHOICES = ("last", "best")


class Loaded(NamedTuple):
    """A model with what made its tokens."""

    decoder: Decoder
    tokenizer: Tokenizer
    checkpoint: Path


def load_run(folder: Path, which: str = "last") -> Loaded:
    """The weights of a run's last or best checkpoint, after their checksums were compared."""
    described, config = run_folder.read_description(folder), run_folder.read_config(folder)
    path = choose(folder, which)
    wrong = checkpoint.damage(path)
    if wrong:
        raise TrainError(f"checkpoint {path} is damaged: {wrong[0]}. Run the training command again: it falls back")
    decoder = build_decoder(config.model, config.residual)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in decoder.named_parameters()}
    checkpoint.load(path, tensors)
    tokenizer = tokenizers.load(folder / TOKENIZER, described["data"]["end_of_text"])
    if tokenizer.fingerprint != described["data"].get("fingerprint", tokenizer.fingerprint):
        raise TrainError(f"{folder / TOKENIZER} is not the tokenizer of this run: restore it from the data")
    return Loaded(decoder, tokenizer, path)


def choose(folder: Path, which: str) -> Path:
    """The folder of a run's last or best checkpoint."""
    there = checkpoint.found(folder / run_folder.CHECKPOINTS)
    if not there:
        raise TrainError(f"{folder} has no checkpoint yet: train until train.checkpoint_every, or to the end")
    if which == "last":
        return there[-1]
    state = json.loads((there[-1] / checkpoint.STATE).read_text(encoding="utf-8"))
    best = there[-1].with_name(checkpoint.step_name(state["best_step"]))
    if best not in there:
        raise TrainError(f"{folder} has no best checkpoint yet: train until train.validate_every, or take the last")
    return best

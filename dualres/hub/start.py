"""Training on from a saved model: what it is, and whether the data are in its tokens."""

from pathlib import Path
from typing import NamedTuple

from dualres.config.schema import ModelConfig, ResidualConfig
from dualres.data import shards
from dualres.data import tokenizer as tokenizers
from dualres.hub import safetensors_files
from dualres.hub.errors import ModelError
from dualres.hub.model_folder import read_ours


class Start(NamedTuple):
    """A converted or exported model that a run begins with."""

    folder: Path
    model: ModelConfig
    residual: ResidualConfig


def read_start(folder: Path) -> Start:
    """The configs of a saved dualres model, its weights compared with them and not loaded."""
    _, model, residual = read_ours(folder)
    if others := sorted({*folder.glob("*.safetensors")} - {*safetensors_files.files(folder)}):
        raise ModelError(
            f"{others[0]} is not part of the model of {folder}, and training would read it too: move it away"
        )
    return Start(folder, model, residual)


def check_tokens(start: Start, data: Path) -> None:
    """Refuse data that another tokenizer made: the model would have to learn its tokens anew."""
    own = start.folder / shards.TOKENIZER
    if not own.is_file():
        return
    index = shards.read_index(data)
    made_by = shards.read_tokenizer(data, index).backend
    if not tokenizers.same_tokens(made_by, tokenizers.read_backend(own), index.end_of_text):
        raise ModelError(
            f"{data} is in the tokens of another tokenizer than {start.folder}'s: prepare the text with "
            f"`dualres prepare SOURCE OUT --tokenizer {own}`"
        )

"""What continues a prompt: a run, or a saved dualres model with the tokens and ends that its own settings name."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from dualres.hub.errors import ModelError
from dualres.hub.export import is_run
from dualres.hub.hf_tokenizer import load_tokenizer
from dualres.hub.model_folder import CONFIG, load_model
from dualres.model.decoder import Decoder
from dualres.train.load import load_run


class Speaker(NamedTuple):
    """A decoder, and text to tokens and back."""

    decoder: Decoder
    encode: Callable[[str], list[int]]  # a prompt, with what the model's tokenizer puts before a text
    decode: Callable[[Sequence[int]], str]
    ends: frozenset[int]  # tokens that end a text


def load_speaker(source: Path, which: str = "last") -> Speaker:
    """The model of a run's last or best checkpoint, or of a saved dualres model's folder."""
    if is_run(source) or not (source / CONFIG).is_file():
        loaded = load_run(source, which)
        end = loaded.tokenizer.end_of_text
        return Speaker(
            loaded.decoder,
            lambda prompt: loaded.tokenizer.encode(prompt) or [end],
            loaded.tokenizer.decode,
            frozenset([end]),
        )
    if which != "last":
        raise ModelError(f"{source} is no run and has one set of weights: leave --checkpoint {which} out")
    model, tokenizer = load_model(source), load_tokenizer(source)
    if tokenizer is None:
        raise ModelError(f"{source} has no tokenizer: put its tokenizer.json and tokenizer_config.json there")
    end = model.generation_config.eos_token_id
    ends = frozenset([end] if isinstance(end, int) else end or [])
    beginnings = [token for token in (tokenizer.bos_token_id, *sorted(ends)) if token is not None]

    def encode(prompt: str) -> list[int]:
        tokens = tokenizer(prompt)["input_ids"] or beginnings[:1]
        if not tokens:
            raise ModelError(f"{source} names no token to begin a text with: give a prompt")
        if max(tokens) >= model.config.vocab_size:
            raise ModelError(
                f"the tokenizer of {source} makes token {max(tokens)}, and the model has {model.config.vocab_size}: "
                "use the tokenizer that it was trained with"
            )
        return list(tokens)

    return Speaker(model.decoder, encode, lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True)), ends)

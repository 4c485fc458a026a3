"""Our tokenizer in the form of `transformers`, and back."""

from pathlib import Path
from typing import Any

from dualres.data.shards import TOKENIZER
from dualres.data.tokenizer import Tokenizer
from dualres.hub.errors import read_by_transformers
from dualres.util.optional_dependencies import need


def as_transformers(tokenizer: Tokenizer, context: int) -> Any:
    """A `PreTrainedTokenizerFast` with the same tokens; the end of a text also pads, on the left, for generation."""
    transformers = need("transformers", "hub", "a Hugging Face tokenizer")
    end = tokenizer.backend.id_to_token(tokenizer.end_of_text)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend,
        eos_token=end,
        pad_token=end,
        padding_side="left",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def load_tokenizer(folder: Path) -> Any | None:
    """The tokenizer beside a saved model, None where there is none."""
    if not any((folder / name).exists() for name in (TOKENIZER, "tokenizer_config.json", "tokenizer.model")):
        return None
    transformers = need("transformers", "hub", "a Hugging Face tokenizer")
    with read_by_transformers(folder):
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)

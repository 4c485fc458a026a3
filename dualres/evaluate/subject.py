"""What is evaluated: a run, an exported folder or any Hugging Face causal LM, all in one form."""

from typing import Any, NamedTuple


class Subject(NamedTuple):
    """A causal LM in the form that `transformers` gives it, with what measuring it must know."""

    name: str  # in tables
    identity: str  # the same for the same weights, config, tokenizer and dtype: results are kept under it
    model: Any  # transformers.PreTrainedModel in eval mode on its device; model(input_ids).logits (B,T,V)
    tokenizer: Any  # transformers.PreTrainedTokenizerBase
    context: int  # tokens that the model can read at once
    prefix: int  # the token that a document is conditioned on: the beginning of a text, or the end of the one before

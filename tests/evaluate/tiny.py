"""Models that are small enough for tests: random Llamas with a byte tokenizer or a small BPE."""

import functools
import json
import pydoc_data.topics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from dualres.data import tokenizer
from dualres.data.tokenizer import END_OF_TEXT, Tokenizer
from dualres.evaluate.documents import DocumentSource, find_sources
from dualres.hub.open_model import TrainedModel
from tests.data.corpus import ODD

CONTEXT = 16
BPE_ENTRIES = 300
TEXTS = [*ODD.values(), "x", "ab", "c" * CONTEXT, "d" * (CONTEXT + 1), "e" * 2 * CONTEXT, "the end of a statement"]


@functools.cache
def bpe() -> Tokenizer:
    """Trained on a piece of the Python language reference."""
    return tokenizer.train_bpe(iter([pydoc_data.topics.topics["for"]]), BPE_ENTRIES)


def byte_tokenizer() -> Any:
    """Of `transformers`: 256 bytes and the end of a text, number 256."""
    return wrapped(tokenizer.byte_tokenizer())


def bpe_tokenizer() -> Any:
    """Of `transformers`: at most 300 entries, the end of a text the last."""
    return wrapped(bpe())


def wrapped(ours: Tokenizer) -> Any:
    """Ours in the form of `transformers`; it takes a copy."""
    return PreTrainedTokenizerFast(tokenizer_object=ours.backend, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def tiny_llama(vocab_size: int = 257, context: int = CONTEXT, **changes: Any) -> Any:
    """Two layers of width 32, always the same weights; they are large, so that it is sure of what it predicts."""
    given = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        **changes,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, max_position_embeddings=context, **given)).eval()


@dataclass(frozen=True)
class InMemory(TrainedModel):
    """A model that was not opened from a folder."""

    identity: str = "tiny"
    prefix: int = 256


def in_memory(name: str, network: Any, tokenizer: Any, context: int) -> InMemory:
    return InMemory(name, Path(name), network, tokenizer, context, prefix=tokenizer.convert_tokens_to_ids(END_OF_TEXT))


def tiny_model(tokens: Any = None, context: int = CONTEXT, **changes: Any) -> InMemory:
    """A Llama with as many entries as its tokenizer, the one of bytes unless another is given."""
    tokens = tokens or byte_tokenizer()
    network = tiny_llama(**{"vocab_size": len(tokens), "context": context, **changes})
    return in_memory("tiny", network, tokens, context)


class Small:
    """A model on a GPU with memory for so many tokens at once; it notes what it is asked."""

    def __init__(self, model: Any, tokens: int):
        self.model, self.tokens = model, tokens
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, tokens: Tensor, **more: Any) -> Any:
        self.asked.append(tokens.numel())
        if tokens.numel() > self.tokens:
            raise torch.OutOfMemoryError(f"{tokens.numel()} tokens")
        return self.model(tokens, **more)


def save_tiny(folder: Path, **changes: Any) -> Path:
    """A folder as `save_pretrained` writes it, with a byte tokenizer."""
    tiny_llama(**changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def source_of(folder: Path, texts: Sequence[str], name: str = "some") -> DocumentSource:
    """The documents of a source, in a file of the folder."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return find_sources(path)[0]

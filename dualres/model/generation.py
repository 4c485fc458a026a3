"""Continue prompts: greedy or sampled, in batches of prompts of different lengths, with or without a cache."""
# B batch  T tokens  V vocabulary

import operator
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dualres.model.attention import KVCache
from dualres.model.decoder import Decoder
from dualres.util.amx import avoid_hidden_tiles


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    cached: bool = True,
) -> list[list[int]]:
    """The `new_tokens` tokens that follow each prompt; temperature 0 is greedy decoding.

    Shorter prompts are padded on the left. `cached=False` recomputes the whole sequence for every token.
    """
    if len(prompts) == 0 or any(len(prompt) == 0 for prompt in prompts):
        raise ValueError(f"prompts={prompts!r}: pass at least one, each with at least one token, such as end of text")
    if new_tokens < 0:
        raise ValueError(f"new_tokens={new_tokens} is negative: use 0 or more")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature={temperature} is not a finite number ≥ 0: use 0 for greedy decoding, or 1")
    avoid_hidden_tiles()
    device = decoder.norm.weight.device
    tokens, attention_mask = left_pad(prompts, device)
    padded = len({len(prompt) for prompt in prompts}) > 1
    cache = KVCache() if cached else None
    new = tokens
    for _ in range(new_tokens):
        mask = attention_mask if padded else None
        logits = decoder(new, attention_mask=mask, cache=cache, last_only=True)[:, -1]  # (B,V)
        chosen = _choose(logits, temperature, generator)
        tokens = torch.cat([tokens, chosen], 1)
        if padded:
            attention_mask = torch.cat([attention_mask, torch.ones_like(chosen, dtype=torch.bool)], 1)
        new = chosen if cached else tokens
    return tokens[:, tokens.shape[1] - new_tokens :].tolist()


def left_pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one left-padded batch, and its attention mask. -> (B,T), (B,T)"""
    rows = [torch.tensor([operator.index(token) for token in prompt], device=device) for prompt in prompts]
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    return pad(rows), pad([torch.ones_like(row, dtype=torch.bool) for row in rows])


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """(B,V) -> (B,1)"""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial((logits.float() / temperature).softmax(-1), 1, generator=generator)

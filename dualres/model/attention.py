"""Grouped-query attention with rotary positions."""
# B batch  T tokens  D width  H head width

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dualres.config.schema import ModelConfig
from dualres.model.context import Context


class Attention(nn.Module):
    """Softmax attention in which `heads // kv_heads` query heads share a key and value head.

    Biases, and norms of queries and keys over a head, are for models that were trained with them.
    """

    def __init__(self, model: ModelConfig, layer: int):
        super().__init__()
        self.layer, self.head_width = layer, model.head_width
        queries, keys = model.heads * model.head_width, model.kv_heads * model.head_width
        biased = model.attention_bias != "none"
        self.query = nn.Linear(model.width, queries, bias=biased)
        self.key = nn.Linear(model.width, keys, bias=biased)
        self.value = nn.Linear(model.width, keys, bias=biased)
        self.output = nn.Linear(queries, model.width, bias=model.attention_bias == "all")
        self.query_norm = nn.RMSNorm(self.head_width, model.norm_eps) if model.query_key_norm else None
        self.key_norm = nn.RMSNorm(self.head_width, model.norm_eps) if model.query_key_norm else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        query, key, value = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, context), rotate(key, context)
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.layer)
        mask = context.mask
        causal = mask is None
        if query.shape[2] == 1:  # a branch, not a product: compiled for any length, `causal` must stay a constant
            causal = False  # one token alone may look at all that are cached
        mixed = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """(B,T,heads·H) -> (B,heads,T,H)"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def rotate(x: Tensor, context: Context) -> Tensor:
    """Rotary positions: the two halves of a head are the two coordinates of H/2 rotated planes. (B,heads,T,H)"""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x * context.cosine + turned * context.sine).to(x.dtype)

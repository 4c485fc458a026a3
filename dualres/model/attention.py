"""Grouped-query attention with rotary positions."""
# B batch  T tokens  D width  H head width

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from dualres.model.context import Context


class Attention(nn.Module):
    """Softmax attention in which `heads // kv_heads` query heads share a key and value head; no biases."""

    def __init__(self, width: int, heads: int, kv_heads: int, layer: int):
        super().__init__()
        self.layer, self.head_width = layer, width // heads
        self.query = nn.Linear(width, heads * self.head_width, bias=False)
        self.key = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.value = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.output = nn.Linear(heads * self.head_width, width, bias=False)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        query = rotate(self.split(self.query(x)), context)
        key = rotate(self.split(self.key(x)), context)
        value = self.split(self.value(x))
        if context.cache is not None:
            key, value = context.cache.update(key, value, self.layer)
        mask = context.mask
        mixed = scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        """(B,T,heads·H) -> (B,heads,T,H)"""
        return x.unflatten(-1, (-1, self.head_width)).transpose(1, 2)


def rotate(x: Tensor, context: Context) -> Tensor:
    """Rotary positions: the two halves of a head are the two coordinates of H/2 rotated planes. (B,heads,T,H)"""
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return (x * context.cosine + turned * context.sine).to(x.dtype)

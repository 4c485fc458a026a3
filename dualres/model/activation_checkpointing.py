"""Activation checkpointing: what a block keeps of its forward pass for the backward pass."""

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from dualres.ops import grouped  # noqa: F401  (it registers dualres::grouped_linear)

Recompute = Literal["none", "selective", "full"]

PRODUCTS = [  # what costs most to compute again for the memory it takes
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.dualres.grouped_linear.default,
]

# "full" keeps the block's inputs alone; "selective" also the results of matrix products and attention.
KEPT: dict[str, dict[str, Any]] = {  # options of `torch.utils.checkpoint.checkpoint`
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)},
}

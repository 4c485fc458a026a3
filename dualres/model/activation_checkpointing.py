"""Activation checkpointing: what a block saves in its forward pass for the backward pass."""

from functools import partial
from typing import Any, Literal

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dualres.ops.grouped import OPERATORS

Recompute = Literal["none", "selective", "full"]

PRODUCTS = [  # the operators that cost most to recompute for the memory they take
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    OPERATORS.grouped_linear.default,
]
DROPOUT = {  # the position of the argument dropout_p in operators that have one
    product: [argument.name for argument in product._schema.arguments].index("dropout_p")
    for product in PRODUCTS
    if "dropout_p" in str(product._schema)
}


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the result of a product, unless it draws random numbers.

    Such an operator must run again: otherwise later draws in the block would get different random numbers.
    """
    place = DROPOUT.get(operator)
    drops = place is not None and (args[place] if len(args) > place else kwargs.get("dropout_p", 0.0)) > 0
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS and not drops else CheckpointPolicy.PREFER_RECOMPUTE


# "full" saves only the block's inputs; "selective" also the results of matrix products and attention. Both save the
# random state, so that a branch's dropout repeats its mask.
CHECKPOINT_OPTIONS: dict[str, dict[str, Any]] = {  # options of `torch.utils.checkpoint.checkpoint`
    "full": {},
    "selective": {"context_fn": partial(create_selective_checkpoint_contexts, keep_products)},
}

"""The operators of the residual pathways, and the grouped matrix product of the experts.

`reference` has every operator as its equation, the definition of correct. `api` is what pathways call: it runs the
device's fused kernels (`cpu` or `triton`, as `dispatch` decides) or the equations. `autograd` registers the kernels as
PyTorch operators with gradients, `arguments` has the arguments of all of them, `checks` validates every call,
`traffic` counts the memory traffic of the kernels.
"""

from dualres.ops.api import (
    depth_weights,
    gate_logits,
    gated_read,
    hyper_read,
    no_autocast,
    passed_on,
    prefix,
    prefix_with_carriers,
    product_dtype,
    read,
    replay,
    rms_norm,
    write,
)
from dualres.ops.arguments import BlockArguments, GateLike, GateParameters, Live, Norm, Prefix, Route
from dualres.ops.grouped import grouped_linear

__all__ = [
    "BlockArguments",
    "GateLike",
    "GateParameters",
    "Live",
    "Norm",
    "Prefix",
    "Route",
    "depth_weights",
    "gate_logits",
    "gated_read",
    "grouped_linear",
    "hyper_read",
    "no_autocast",
    "passed_on",
    "prefix",
    "prefix_with_carriers",
    "product_dtype",
    "read",
    "replay",
    "rms_norm",
    "write",
]

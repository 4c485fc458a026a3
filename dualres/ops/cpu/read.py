"""Reads (phase 2) on a CPU: `gated_read` with gates, `plain_read` without.

Both compute in float32. Gradients of parameters are summed over some tiles of tokens in float32, these sums in float64.
"""

from torch import Tensor

from dualres.ops.arguments import ReadArguments
from dualres.ops.cpu.gated_read import GATED, gated_read, gated_read_backward
from dualres.ops.cpu.launch import address_of
from dualres.ops.cpu.plain_read import PLAIN, plain_read, plain_read_backward
from dualres.ops.cpu.read_inputs import read_inputs, scratch_of


def read(arguments: ReadArguments, results: list[Tensor]) -> None:
    inputs = read_inputs(arguments, *results)
    run, sizes = (gated_read, GATED) if arguments.gates else (plain_read, PLAIN)
    run(inputs, inputs.tokens, arguments.retrieved.dtype, scratch_of(inputs, sizes, backward=False))


def read_backward(
    d_h: Tensor,
    d_next: Tensor,
    d_live: Tensor | None,
    d_retrieved: Tensor | None,
    arguments: ReadArguments,
    gradients: ReadArguments,
) -> None:
    inputs = read_inputs(
        arguments,
        d_h,
        d_next,
        address_of(d_live),
        address_of(d_retrieved),
        arguments.carried,
        gradients.retrieved.data_ptr(),
        address_of(gradients.log_partition),
        [update.data_ptr() for update in gradients.updates],
        address_of(gradients.coefficients),
        address_of(gradients.carrier),
    )
    rows = [gradients.query, *gradients.gates[::3], gradients.norm]
    sums = [*rows, *gradients.gates[1::3], *gradients.gates[2::3]]
    run, sizes = (gated_read_backward, GATED) if arguments.gates else (plain_read_backward, PLAIN)
    run(inputs, inputs.tokens, arguments.retrieved.dtype, scratch_of(inputs, sizes, backward=True), sums)

"""Cheap health metrics of the streams, from one forward pass: logged during training."""

import math
from collections.abc import Callable

import torch

from dualres.analyze.cka import StreamStates, same_layer_cka
from dualres.analyze.gates import WriteGates
from dualres.analyze.norms import Norms
from dualres.analyze.retrieval import DepthWeights
from dualres.analyze.taps import eager, stream_count, watching
from dualres.model.block import ResidualStack

LAST = 32  # tokens of each sequence that CKA compares


@torch.no_grad()
def health(stack: ResidualStack, forward: Callable[[], object]) -> dict[str, float]:
    """Metrics of the forward pass that `forward` runs; compiled blocks run eagerly. Non-finite values are omitted.

    analysis/rms_stream_j      RMS of stream j after the last layer
    analysis/rms_history_max   largest RMS of H_0 … H_N
    analysis/cka               CKA of streams 0 and 1 after the same layer, mean over layers: 1 means they are copies
    analysis/write_gap         |E[β¹ − β⁰]| of the MLPs, mean over layers
    analysis/divergence        Jensen–Shannon divergence between the two streams' depth weights, mean over branches
    """
    states, gates, depth, norms = StreamStates(LAST), WriteGates(), DepthWeights(), Norms()
    with eager(stack), watching(stack, states, gates, depth, norms):
        forward()
    arrays = norms.arrays() | gates.arrays() | depth.arrays()
    metrics = {f"rms_stream_{j}": value for j, value in enumerate(arrays["stream_rms"][-1])}
    metrics["rms_history_max"] = arrays["history_rms"].max()
    if stream_count(stack) > 1:
        metrics["cka"] = same_layer_cka(states.states()).mean()
    if "write_gaps" in arrays:
        metrics["write_gap"] = arrays["write_gaps"].abs().mean()
    if "divergence" in arrays:
        metrics["divergence"] = arrays["divergence"].mean()
    values = {f"analysis/{name}": float(value) for name, value in metrics.items()}
    return {name: value for name, value in values.items() if math.isfinite(value)}

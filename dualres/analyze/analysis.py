"""Everything the paper shows of a model's streams, on given sequences."""
# B batch  T tokens  L layers  J streams

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dualres.analyze.analysis_files import Analysis
from dualres.analyze.cka import StreamStates, cross_stream_cka
from dualres.analyze.experts import RouterWatcher, watching_routers
from dualres.analyze.gates import WriteGates, association, rescue_gaps, write_gaps
from dualres.analyze.norms import Norms
from dualres.analyze.rescue import kl_rescue
from dualres.analyze.retrieval import DepthWeights
from dualres.analyze.taps import stream_count, watching
from dualres.model.decoder import Decoder
from dualres.util.progress import Show, silent


class Protocol(NamedTuple):
    """How a model is looked at; the defaults are the paper's, with its sequences of 4096 tokens."""

    sequences: int = 4  # of CKA, rescue and gates
    last: int = 128  # tokens of each that count there
    retrieval_sequences: int = 8  # of retrieval, norms and experts, all of whose tokens count


@torch.no_grad()
def analyse(
    decoder: Decoder, sequences: Tensor, protocol: Protocol, about: dict[str, Any], show: Show = silent
) -> Analysis:
    """What `sequences` (B,T) show, the first ones for each part. The decoder is as before when it returns."""
    device = next(decoder.parameters()).device
    last, streams = min(protocol.last, sequences.shape[1]), stream_count(decoder.stack)
    states, gates, depth, norms, router = StreamStates(last), WriteGates(last), DepthWeights(), Norms(), RouterWatcher()
    few, many = min(protocol.sequences, len(sequences)), min(protocol.retrieval_sequences, len(sequences))
    rows = sequences[: max(few, many)].to(device)
    for number, row in enumerate(rows):
        show(f"watching  sequence {number + 1}/{len(rows)}")
        watchers = [*([states, gates] if number < few else []), *([depth, norms] if number < many else [])]
        routers = [router] if number < many else []
        with watching(decoder.stack, *watchers), watching_routers(decoder.stack, *routers):
            hidden = decoder.hidden(row[None])
        if not hidden.isfinite().all():
            raise FloatingPointError(f"the model's states are not finite in sequence {number + 1}")
    found: dict[str, Any] = {}
    found["stream_rms"], found["history_rms"] = norms.means()
    if (maps := depth.maps()) is not None:
        found["retrieval"], found["retrieval_output"] = maps
    if (divergences := depth.divergences()) is not None:
        found["divergence"], found["divergence_output"] = divergences
    if (balance := router.balance()) is not None:
        found["expert_load"], found["auxiliary"] = balance
    if (means := gates.means()) is not None:
        found["write_gates"] = means
    if streams > 1:
        found["cka"] = cross_stream_cka(states.states(), show)
        rescue = kl_rescue(decoder, rows[:few], last, show)
        found["kl_keep"], found["kl_none"] = rescue
        found["rescue"] = rescue.gain()
    summary = summarise(found)
    described = {
        **about,
        "layers": decoder.config.layers,
        "width": decoder.config.width,
        "streams": streams,
        "blocks": len(decoder.stack.blocks),
        "tokens_per_sequence": sequences.shape[1],
        "sequences": few,
        "last_tokens": last,
        "retrieval_sequences": many,
    }
    return Analysis(described, summary, {name: np.asarray(values.cpu(), np.float64) for name, values in found.items()})


def summarise(found: dict[str, Tensor]) -> dict[str, float]:
    """The single numbers; the gaps between two streams join `found`."""
    summary = {}
    if "divergence" in found:
        summary["mean_divergence"] = float(found["divergence"].mean())
    if "auxiliary" in found:
        summary["mean_auxiliary"] = float(found["auxiliary"].mean())
    if "cka" in found and len(found["cka"]) == 2:
        cross = found["cka"][0, 1]
        summary["mean_cka"] = float(cross.mean())
        summary["mean_cka_same_layer"] = float(cross.diagonal().mean())
    if "write_gates" in found and found["write_gates"].shape[1] == 2:
        found["write_gaps"] = write_gaps(found["write_gates"])
        summary["mean_absolute_write_gap"] = float(found["write_gaps"].abs().mean())
    if "rescue" in found and found["rescue"].shape[1] == 2:
        found["rescue_gaps"] = rescue_gaps(found["rescue"])
        summary["mean_rescue_gap"] = float(found["rescue_gaps"].mean())
    if "write_gaps" in found and "rescue_gaps" in found:
        slope, intercept, correlation = association(found["write_gaps"], found["rescue_gaps"])
        summary |= {"gap_slope": slope, "gap_intercept": intercept, "gap_correlation": correlation}
    return summary

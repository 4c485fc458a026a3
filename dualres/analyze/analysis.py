"""Runs the paper's stream analyses on sequences of tokens, and stores the results.

A folder holds analysis.json, for people and the report, and analysis.npz, for computations.
"""
# B batch  T tokens  L layers  J streams

import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dualres.analyze.cka import StreamStates, cross_stream_cka
from dualres.analyze.experts import RouterChoices
from dualres.analyze.gates import WriteGates, association
from dualres.analyze.norms import Norms
from dualres.analyze.rescue import kl_rescue
from dualres.analyze.retrieval import DepthWeights
from dualres.analyze.taps import stream_count, watching
from dualres.config.schema import ConfigError
from dualres.model.decoder import Decoder
from dualres.util.atomic_files import nonfinite_to_null, write_bytes, write_json
from dualres.util.progress import Show, silent

FOLDER, JSON, NPZ = "analysis", "analysis.json", "analysis.npz"
ARRAYS = {  # J streams  L layers  N blocks  O output streams  E experts
    "cka": "linear CKA of stream i after layer m with stream j after layer n, [i,j,m,n] (J,J,L,L)",
    "kl_keep": "KL(p_clean ‖ p_keep-j) after layer n, nats (L,J)",
    "kl_none": "KL(p_clean ‖ p_zero-all) after layer n, nats (L,)",
    "rescue": "R, rescue gain by layer and kept stream (L,J)",
    "write_gates": "mean write gate of every branch, attention and MLP alternating (2L,J)",
    "write_gaps": "g, by layer (L,)",
    "rescue_gaps": "d, by layer (L,)",
    "retrieval": "mean depth weight of H_0 … H_N in every branch's read, attention and MLP alternating (2L,O,N+1)",
    "retrieval_output": "mean depth weight of H_0 … H_N in the output's read (O,N+1)",
    "divergence": "Jensen–Shannon divergence between the two streams' depth weights, nats (2L,)",
    "divergence_output": "the same for the output's read ()",
    "stream_rms": "mean RMS of the streams after every layer (L,J)",
    "history_rms": "mean RMS of H_0 … H_N (N+1,J)",
    "expert_load": "fraction of the assignments that each expert receives (L,E)",
    "auxiliary": "auxiliary loss of the routers, 1 for uniform routing (L,)",
    "router_curve": "auxiliary loss during training: step, mean over layers (steps,2)",
}

Array = NDArray[np.float64]


class AnalysisProtocol(NamedTuple):
    """How many tokens each part uses; the defaults are the paper's, whose sequences have 4096 tokens."""

    sequences: int = 4  # for CKA, rescue and gates
    last: int = 128  # tokens of each sequence used there
    retrieval_sequences: int = 8  # for retrieval, norms and experts, with all their tokens


class Analysis(NamedTuple):
    """Results for one model. Arrays that do not apply are absent, such as CKA of a single stream."""

    about: dict[str, Any]  # the model and the protocol
    summary: dict[str, float]
    arrays: dict[str, Array]  # documented in ARRAYS

    def protocol(self) -> str:
        """The protocol in words."""
        keys = ("sequences", "tokens_per_sequence", "data", "last_tokens", "retrieval_sequences")
        sequences, tokens, data, last, many = (self.about.get(key, "unknown") for key in keys)
        return f"{sequences} sequences of {tokens} tokens of {data}, the last {last}; {many} sequences for retrieval"


@torch.no_grad()
def analyze(
    decoder: Decoder, sequences: Tensor, protocol: AnalysisProtocol, about: dict[str, Any], show: Show = silent
) -> Analysis:
    """Analyze the decoder on the first of `sequences` (B,T), as many as each part needs."""
    device = next(decoder.parameters()).device
    last, streams = min(protocol.last, sequences.shape[1]), stream_count(decoder.stack)
    states, gates, depth, norms, router = StreamStates(last), WriteGates(last), DepthWeights(), Norms(), RouterChoices()
    few, many = min(protocol.sequences, len(sequences)), min(protocol.retrieval_sequences, len(sequences))
    rows = sequences[: max(few, many)].to(device)
    for number, row in enumerate(rows):
        show(f"watching  sequence {number + 1}/{len(rows)}", number / len(rows))
        watchers = [*([states, gates] if number < few else []), *([depth, norms, router] if number < many else [])]
        with watching(decoder.stack, *watchers):
            hidden = decoder.hidden(row[None])
        if not hidden.isfinite().all():
            raise FloatingPointError(f"the model's states are not finite in sequence {number + 1}")
    arrays = norms.arrays() | depth.arrays() | router.arrays() | gates.arrays()
    if streams > 1:
        arrays["cka"] = cross_stream_cka(states.states(), show)
        arrays |= kl_rescue(decoder, rows[:few], last, show)
    about = {
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
    arrays = {name: values.double().cpu() for name, values in arrays.items()}
    return Analysis(about, _summary(arrays), {name: values.numpy() for name, values in arrays.items()})


def _summary(arrays: dict[str, Tensor]) -> dict[str, float]:
    means = {"mean_divergence": "divergence", "mean_auxiliary": "auxiliary", "mean_rescue_gap": "rescue_gaps"}
    summary = {name: float(arrays[array].mean()) for name, array in means.items() if array in arrays}
    if "cka" in arrays and len(arrays["cka"]) == 2:
        cross = arrays["cka"][0, 1]
        summary["mean_cka"] = float(cross.mean())
        summary["mean_cka_same_layer"] = float(cross.diagonal().mean())
    if "write_gaps" in arrays:
        summary["mean_absolute_write_gap"] = float(arrays["write_gaps"].abs().mean())
    if "write_gaps" in arrays and "rescue_gaps" in arrays:
        slope, intercept, correlation = association(arrays["write_gaps"], arrays["rescue_gaps"])
        summary |= {"gap_slope": slope, "gap_intercept": intercept, "gap_correlation": correlation}
    return summary


def write_analysis(folder: Path, analysis: Analysis) -> None:
    """Write both files, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).unlink(missing_ok=True)  # an old one must not remain next to new arrays
    packed = io.BytesIO()
    np.savez_compressed(packed, **analysis.arrays)  # type: ignore[arg-type]
    write_bytes(folder / NPZ, packed.getvalue())
    arrays = {name: values.tolist() for name, values in analysis.arrays.items()}
    legend = {name: ARRAYS[name] for name in arrays}
    data = {"about": analysis.about, "summary": analysis.summary, "legend": legend, "arrays": arrays}
    write_json(folder / JSON, nonfinite_to_null(data))


def read_analysis(folder: Path) -> Analysis | None:
    """The analysis that `write_analysis` stored in the folder, or None."""
    path = folder / JSON
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        arrays = {name: np.array(values, np.float64) for name, values in data["arrays"].items()}  # null becomes NaN
        summary = {name: math.nan if value is None else value for name, value in data["summary"].items()}
        return Analysis(dict(data["about"]), summary, arrays)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): run `dualres analyze` again") from None

"""What was found in one model, as files: analysis.json for people and the report, analysis.npz for computations."""

import io
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dualres.config.schema import ConfigError
from dualres.util.atomic_files import write_bytes, write_json

FOLDER, JSON, NPZ = "analysis", "analysis.json", "analysis.npz"

Array = NDArray[np.float64]


class Analysis(NamedTuple):
    """Arrays that a model has no use for are absent: CKA of a single stream, say. ARRAYS tells what each is."""

    about: dict[str, Any]  # the model and how it was looked at
    summary: dict[str, float]  # single numbers
    arrays: dict[str, Array]


ARRAYS = {  # J streams  L layers  N blocks  O output streams  E experts
    "cka": "linear CKA of stream i after layer m with stream j after layer n, [i,j,m,n] (J,J,L,L)",
    "kl_keep": "KL(p_clean ‖ p_keep-j) after layer n, nats (L,J)",
    "kl_none": "KL(p_clean ‖ p_zero-all) after layer n, nats (L,)",
    "rescue": "R, rescue gain by layer and kept stream (L,J)",
    "write_gates": "mean write gate of every branch, attention and MLP in turn (2L,J)",
    "write_gaps": "g, by layer (L,)",
    "rescue_gaps": "d, by layer (L,)",
    "retrieval": "mean depth weight of H_0 … H_N in every branch's read, attention and MLP in turn (2L,O,N+1)",
    "retrieval_output": "the same of the output's read (O,N+1)",
    "divergence": "Jensen–Shannon divergence between the two streams' depth weights, nats (2L,)",
    "divergence_output": "the same of the output's read ()",
    "stream_rms": "mean root mean square of the streams after every layer (L,J)",
    "history_rms": "the same of H_0 … H_N (N+1,J)",
    "expert_load": "share of the assignments that each expert gets (L,E)",
    "auxiliary": "auxiliary loss of the routers, 1 where routing is uniform (L,)",
    "router_curve": "auxiliary loss over training: step, mean over layers (steps,2)",
}


def protocol(analysis: Analysis) -> str:
    """How a model was looked at, in words."""
    keys = ("sequences", "tokens_per_sequence", "data", "last_tokens", "retrieval_sequences")
    sequences, tokens, data, last, many = (analysis.about.get(key, "unknown") for key in keys)
    return f"{sequences} sequences of {tokens} tokens of {data}, the last {last}; {many} sequences for retrieval"


def write_analysis(folder: Path, analysis: Analysis) -> None:
    """Both files, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / JSON).unlink(missing_ok=True)  # an old one must not stand beside new arrays
    packed = io.BytesIO()
    np.savez_compressed(packed, **analysis.arrays)  # type: ignore[arg-type]
    write_bytes(folder / NPZ, packed.getvalue())
    arrays = {name: _as_lists(values.tolist()) for name, values in analysis.arrays.items()}
    legend = {name: ARRAYS[name] for name in arrays}
    found = {"about": analysis.about, "summary": _as_lists(analysis.summary), "legend": legend, "arrays": arrays}
    write_json(folder / JSON, found)


def read_analysis(folder: Path) -> Analysis | None:
    """What `write_analysis` wrote; None where there is nothing."""
    path = folder / JSON
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        arrays = {name: np.array(_with_nan(values), np.float64) for name, values in found["arrays"].items()}
        return Analysis(dict(found["about"]), {k: _with_nan(v) for k, v in found["summary"].items()}, arrays)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): make it anew with `dualres analyze`") from None


def _as_lists(values: Any) -> Any:
    """JSON has no NaN: null."""
    if isinstance(values, dict):
        return {key: _as_lists(value) for key, value in values.items()}
    if isinstance(values, list):
        return [_as_lists(value) for value in values]
    return None if isinstance(values, float) and not math.isfinite(values) else values


def _with_nan(values: Any) -> Any:
    if isinstance(values, list):
        return [_with_nan(value) for value in values]
    return math.nan if values is None else values

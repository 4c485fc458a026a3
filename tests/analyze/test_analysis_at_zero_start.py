"""What is known of the streams at the zero start: queries and gate scales zero."""

import numpy as np
import pytest

from dualres.analyze.analysis import AnalysisProtocol, analyze
from dualres.model.decoder import build_decoder
from tests.residual.test_zero_start import gates_closed
from tests.small import RESIDUALS, model_config, random_tokens

PROTOCOL = AnalysisProtocol(sequences=2, last=9, retrieval_sequences=2)


@pytest.mark.parametrize("name", ["mhc-2", "mhc-4", "dar-block", "dar-full", "dar-selfkv", "dar-fixedkv", "dar-crossv"])
def test_streams_are_one(name: str):
    """Equal streams: CKA 1, equal write gates and rescue, no divergence, uniform reads."""
    decoder = build_decoder(model_config(init_std=0.2), gates_closed(RESIDUALS[name]), seed=1)
    found = analyze(decoder, random_tokens(2, 19), PROTOCOL, {})
    diagonal = found.arrays["cka"][:, :, range(5), range(5)]
    np.testing.assert_allclose(diagonal, 1, atol=1e-12)
    assert (found.arrays["write_gates"] == 1).all()
    if "divergence" in found.arrays:
        assert found.arrays["divergence"].max() < 1e-12
        weights = found.arrays["retrieval"]
        np.testing.assert_allclose(weights, np.nanmax(weights, 2, keepdims=True) + 0 * weights, atol=1e-6)


@pytest.mark.parametrize("name", ["dar-block", "dar-full", "dar-selfkv", "dar-crossv"])
def test_either_stream_rescues_as_much(name: str):
    decoder = build_decoder(model_config(init_std=0.2), gates_closed(RESIDUALS[name]), seed=1)
    rescue = analyze(decoder, random_tokens(2, 19), PROTOCOL, {}).arrays["rescue"]
    assert (rescue[:, 0] == rescue[:, 1]).all()
    assert (rescue > 0.01).all()


def test_fixed_roles_in_full_form():
    """Stream 1 holds all values: alone it is the whole model, and without it stream 0 is worth nothing."""
    decoder = build_decoder(model_config(init_std=0.2), gates_closed(RESIDUALS["dar-fixedkv"]), seed=1)
    found = analyze(decoder, random_tokens(2, 19), PROTOCOL, {})
    assert (found.arrays["rescue"][:, 0] == 0).all()
    assert (found.arrays["rescue"][:, 1] == 1).all()
    assert (found.arrays["kl_none"] > 1e-3).all()


@pytest.mark.parametrize("name", ["standard", "attnres-block", "attnres-vproj"])
def test_a_single_stream_has_nothing_to_compare(name: str):
    """VProj's stored pair, key and value, are not two streams."""
    decoder = build_decoder(model_config(init_std=0.2), RESIDUALS[name], seed=1)
    found = analyze(decoder, random_tokens(2, 19), PROTOCOL, {})
    assert not {"cka", "rescue", "write_gates", "divergence"} & found.arrays.keys()
    assert found.about["streams"] == 1
    assert ("retrieval" in found.arrays) == (name != "standard")  # by the inspection method, not by class
    assert len(found.arrays["stream_rms"]) == 5

"""Every number of an analysis equals an independent NumPy computation on the states of the NumPy oracle."""

import dataclasses

import numpy as np
import pytest
import torch

from dualres.analyze.analysis import Analysis, AnalysisProtocol, analyze
from dualres.config.schema import ResidualConfig
from tests import equations
from tests.equations import Array, Look, Network
from tests.small import RESIDUALS, model_config, random_tokens, stirred
from tests.test_equations import network

TOLERANCE = 1e-6
LAST, FEW = 5, 2  # tokens, sequences
TOKENS = random_tokens(3, 7)
ROWS = {
    **{name: RESIDUALS[name] for name in ("mhc-2", "mhc-4", "dar-block", "dar-full")},
    **{name: RESIDUALS[name] for name in ("dar-selfkv", "dar-fixedkv", "dar-crossv")},
    # Blocks of three branches: the MLP of a layer may open a block, and then has no live state before it.
    "dar-block-three-branches": ResidualConfig("dar-block", branches_per_block=3),
}


@dataclasses.dataclass
class Case:
    analysis: Analysis
    weights: equations.Weights
    net: Network
    looks: list[Look]
    clean: Array  # (B,T,V)

    @property
    def layers(self) -> int:
        return self.net.layers

    @property
    def streams(self) -> int:
        return len(self.looks[0].streams[0])


@pytest.fixture(scope="module", params=ROWS)
def case(request: pytest.FixtureRequest) -> Case:
    model = model_config(layers=4, width=16, heads=2, kv_heads=1, ffn_width=24)
    decoder = stirred(model, ROWS[request.param]).double()
    net = network(model, ROWS[request.param])
    weights = {name: parameter.detach().numpy() for name, parameter in decoder.named_parameters()}
    looks = [Look() for _ in TOKENS]
    clean = equations.logits(weights, TOKENS.numpy(), net, looks)
    analysis = analyze(decoder, TOKENS, AnalysisProtocol(sequences=FEW, last=LAST, retrieval_sequences=3), {})
    return Case(analysis, weights, net, looks, clean)


def close(ours: Array | float, wanted: Array | float) -> None:
    np.testing.assert_allclose(ours, wanted, rtol=0, atol=TOLERANCE * max(1.0, float(np.nanmax(np.abs(wanted)))))


def test_cka(case: Case):
    """By the definition with the centring matrix: tr(K H L H) / √(tr(K H K H) tr(L H L H))."""
    kernels = []
    for j in range(case.streams):
        for layer in range(case.layers):
            x = np.concatenate([look.streams[2 * layer + 1][j, -LAST:] for look in case.looks[:FEW]])
            centring = np.eye(len(x)) - np.ones((len(x), len(x))) / len(x)
            kernels.append(centring @ x @ x.T @ centring)
    wanted = np.array(
        [[np.trace(a @ b) / np.sqrt(np.trace(a @ a) * np.trace(b @ b)) for b in kernels] for a in kernels]
    )
    size = (case.streams, case.layers, case.streams, case.layers)
    close(case.analysis.arrays["cka"], wanted.reshape(size).transpose(0, 2, 1, 3))
    assert case.analysis.arrays["cka"].min() < 0.98  # there is something to tell apart


def divergence(case: Case, layer: int, kept: int) -> float:
    """KL(p_clean ‖ p_cut), the mean over the last tokens of all sequences."""
    looks = [Look(cut=(2 * layer + 1, kept)) for _ in range(FEW)]
    changed = equations.logits(case.weights, TOKENS.numpy()[:FEW], case.net, looks)
    total = []
    for row in range(FEW):
        for t in range(TOKENS.shape[1] - LAST, TOKENS.shape[1]):
            p, q = equations.softmax(case.clean[row, t]), equations.softmax(changed[row, t])
            total.append(sum(p * (np.log(p) - np.log(q))))
    return float(np.mean(total))


def test_rescue_and_gaps(case: Case):
    found = case.analysis.arrays
    keep = np.array([[divergence(case, n, j) for j in range(case.streams)] for n in range(case.layers)])
    none = np.array([divergence(case, n, 99) for n in range(case.layers)])
    close(found["kl_keep"], keep)
    close(found["kl_none"], none)
    rescue = np.array([[1 - keep[n, j] / max(none[n], 1e-12) for j in range(case.streams)] for n in range(case.layers)])
    close(found["rescue"], rescue)
    gates = np.array(
        [
            [np.mean([look.write_gates[number][j, -LAST:] for look in case.looks[:FEW]]) for j in range(case.streams)]
            for number in range(2 * case.layers)
        ]
    )
    close(found["write_gates"], gates)
    if case.streams == 2:
        g, d = gates[1::2, 1] - gates[1::2, 0], rescue[:, 1] - rescue[:, 0]
        close(found["write_gaps"], g)
        close(found["rescue_gaps"], d)
        summary = case.analysis.summary
        close(summary["mean_absolute_write_gap"], float(np.mean(np.abs(g))))
        close(summary["gap_correlation"], float(np.corrcoef(g, d)[0, 1]))
        slope, intercept = np.polyfit(g, d, 1)
        close(summary["gap_slope"], slope)
        close(summary["gap_intercept"], intercept)


def test_retrieval(case: Case):
    if case.net.family != "dar":
        assert "retrieval" not in case.analysis.arrays
        return
    states = case.analysis.arrays["retrieval"].shape[2]
    numbers = [*range(2 * case.layers), -1]
    weights = np.full((len(numbers), 2, states), np.nan)
    divergences = np.zeros(len(numbers))
    for row, number in enumerate(numbers):
        tokens = []
        for look in case.looks:
            query, candidates = look.candidates[number]
            for t in range(TOKENS.shape[1]):
                tokens.append([depth_weights(case.net, query, candidates, j, t) for j in range(2)])
        seen = np.array(tokens)  # (tokens,2,R)
        weights[row, :, : seen.shape[2]] = seen.mean(0)
        divergences[row] = np.mean([jensen_shannon(*pair) for pair in seen])
    close(case.analysis.arrays["retrieval"], weights[:-1])
    close(case.analysis.arrays["retrieval_output"], weights[-1])
    close(case.analysis.arrays["divergence"], divergences[:-1])
    close(case.analysis.arrays["divergence_output"], divergences[-1])
    assert np.isnan(case.analysis.arrays["retrieval"][0, 0, 1:]).all()  # nothing there to read: blank


def depth_weights(net: Network, query: Array | None, candidates: list[Array], j: int, t: int) -> Array:
    key, _ = equations.ROUTES[net.route](j)
    if query is None:
        return np.ones(1)
    return equations.softmax([query[j] @ equations.rms_norm(state[key, t], net.eps) for state in candidates])


def jensen_shannon(p: Array, q: Array) -> float:
    middle = (p + q) / 2
    return float(sum(p * np.log(p / middle)) + sum(q * np.log(q / middle))) / 2


def test_sizes(case: Case):
    wanted = np.zeros((case.layers, case.streams))
    for layer in range(case.layers):
        seen = np.concatenate([look.streams[2 * layer + 1] for look in case.looks], axis=1)  # (J,tokens,D)
        wanted[layer] = np.sqrt((seen**2).mean(2)).mean(1)
    close(case.analysis.arrays["stream_rms"], wanted)
    embedding = case.weights["vocabulary.table.weight"][TOKENS.numpy()]
    states = [np.sqrt((embedding**2).mean(2)).mean() * np.ones(case.streams)]
    size = case.net.branches_per_block
    for end in [*range(size - 1, 2 * case.layers - 1, size), 2 * case.layers - 1]:
        seen = np.concatenate([look.streams[end] for look in case.looks], axis=1)
        states.append(np.sqrt((seen**2).mean(2)).mean(1))
    close(case.analysis.arrays["history_rms"], np.array(states))


@pytest.mark.parametrize("tokens", [3, 40], ids=["fewer tokens than width", "more"])
def test_cka_by_either_product(tokens: int):
    """Both forms of the same number, and a stream that is the same at every token has none."""
    from dualres.analyze.cka import cross_stream_cka

    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, tokens, 8, generator=generator, dtype=torch.float64) for _ in range(3)]
    states[2][1] = 7.0
    found = cross_stream_cka(states).numpy()
    x, y = (states[0][0] - states[0][0].mean(0)).numpy(), (states[1][1] - states[1][1].mean(0)).numpy()
    wanted = np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    assert found[0, 1, 0, 1] == pytest.approx(wanted, abs=1e-12)
    assert np.isnan(found[0, 1, 0, 2])
    assert np.isnan(found[1, 1, 2, 2])

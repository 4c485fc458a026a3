"""Which kernels run where, and that operators behave as PyTorch's own: opcheck, autocast, recomputation, threads."""

import copy
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dualres import ops
from dualres.config.schema import ResidualConfig
from dualres.model.decoder import Decoder
from dualres.ops import GateParameters, Live, Norm, Prefix, autograd, dispatch
from dualres.residual import route
from tests.small import RESIDUALS, gradients, model_config, next_token_loss, random_tokens, relative_error, stirred

TOKENS, WIDTH = (2, 5), 24
DUAL: Any = {"route": route.DUAL, "eps": 1e-6}
SINGLE: Any = {"route": route.SINGLE, "eps": 1e-6}


def stream(*shape: int) -> Tensor:
    return torch.randn(*shape, *TOKENS, WIDTH, requires_grad=True)


def gate(values: int, streams: int) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in ((values, streams, WIDTH), (1,), (values,))]


def coefficients(updates: int, streams: int) -> Tensor:
    return torch.randn(updates, streams, *TOKENS, requires_grad=True)


def sample_inputs() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Every operator with arguments, in each of its forms."""
    weight, query = torch.randn(WIDTH, requires_grad=True), torch.randn(2, WIDTH, requires_grad=True)
    gates = [*gate(2, 2), *gate(2, 2), *gate(1, 2)]
    partition = torch.randn(2, *TOKENS, requires_grad=True)
    dual, single = [list(part) for part in route.DUAL], [list(part) for part in route.SINGLE]
    first = stream(2), partition, None, [], None, None, None, gates[:6], weight, *dual, 0, 1e-6, 1e-6
    two, carried = ([stream(), stream()], coefficients(2, 2)), stream(2)
    later = stream(2), partition, None, *two, None, query, gates, None, *dual, 0, 1e-6, 1e-6
    chained = stream(2).detach(), partition, stream(2), *two, carried, query, gates, None, *dual, 1, 1e-6, 1e-6
    alone = partition[:1].detach(), None, [stream()], torch.ones(1, 1, *TOKENS), None, query[:1].detach()
    mixing = [*gate(3, 3), *gate(3, 3), *gate(9, 3)]
    history, queries = [stream(2), stream(2), stream(2)], torch.randn(2, 2, WIDTH, requires_grad=True)
    three = [stream(), stream(), stream()]
    return {
        "prefix": (autograd.prefix.recorded, (history, queries, *dual, 1e-6)),
        "read-first": (autograd.read.recorded, first),
        "read-later": (autograd.read.recorded, later),
        "read-without-gates": (autograd.read.recorded, (stream(1), *alone, [], weight, *single, 0, 1e-6, 1e-6)),
        "read-chained": (autograd.read.recorded, chained),
        "hyper_read": (
            autograd.hyper_read.recorded,
            (three, coefficients(3, 3), stream(3), mixing, weight, 2, 5, 1e-6, 1e-6),
        ),
        "write": (autograd.write.recorded, (*two, None, 0)),
        "write-chained": (autograd.write.recorded, (*two, carried, 1)),
        "write-constant": (autograd.write.recorded, ([stream(), stream()], torch.ones(2, 1, *TOKENS), None, 0)),
    }


@pytest.mark.parametrize("name", sample_inputs())
def test_opcheck(name: str):
    op, inputs = sample_inputs()[name]
    torch.library.opcheck(op, inputs)


@pytest.mark.parametrize("name", RESIDUALS)
def test_a_deep_model_equals_the_reference(name: str, monkeypatch: Any):
    """Twenty layers, loss and all gradients: as near to float64 as the equations in float32 are.

    Gradients are joined by module: a scalar's may cancel to nearly nothing, and alone its rounding has no bound.
    """
    decoder, tokens = stirred(model_config(layers=20), RESIDUALS[name], noise=0.05), random_tokens()

    def run(kind: str, decoder: Decoder) -> tuple[Tensor, dict[str, Tensor]]:
        monkeypatch.setattr(dispatch, "FORCED", kind)
        decoder.zero_grad()
        loss = next_token_loss(decoder(tokens), tokens)
        loss.backward()
        joined: dict[str, list[Tensor]] = {}
        for parameter, gradient in gradients(decoder).items():
            joined.setdefault(".".join(parameter.split(".")[:4]), []).append(gradient.flatten())
        return loss.detach(), {module: torch.cat(parts) for module, parts in joined.items()}

    (loss, ours), (_, plain) = run("cpu", decoder), run("reference", decoder)
    wanted, exact = run("reference", copy.deepcopy(decoder).double())
    assert abs(loss - wanted) < 1e-6 * wanted
    assert len(exact) > 20
    for module, gradient in exact.items():
        rounding = relative_error(plain[module], gradient)
        assert relative_error(ours[module], gradient) < max(1e-5, 2 * rounding), module


def trained(decoder: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    decoder.zero_grad()
    next_token_loss(decoder(tokens), tokens).backward()
    return gradients(decoder)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", ["attnres-block", "dar-block", "mhc-4"])
def test_two_runs_are_bit_identical(name: str, threads: int):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        decoder, tokens = stirred(model_config(), RESIDUALS[name]), random_tokens(batch=3, length=37)
        first, again = trained(decoder, tokens), trained(decoder, tokens)
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(gradient, again[name]) for name, gradient in first.items())


def test_threads_change_no_more_than_the_order_of_sums():
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"], noise=0.1), random_tokens(batch=3, length=37)
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(trained(decoder, tokens))
    torch.set_num_threads(before)
    one, three = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in found)
    assert relative_error(three, one) < 1e-5


@pytest.mark.parametrize("name", sample_inputs())
def test_no_stream_is_kept_but_what_was_given(name: str):
    """For the backward pass: states, updates and parameters as they came, and token-wise numbers."""
    operator, inputs = sample_inputs()[name]
    given = {id(x) for x in tree_leaves(inputs) if isinstance(x, Tensor)}
    kept = kept_by(lambda: operator(*inputs))
    assert {id(x) for x in kept} & given
    assert all(x.shape[-1] != WIDTH for x in kept if id(x) not in given)


def test_a_plain_sum_keeps_no_update():
    rows, weights = [stream() for _ in range(3)], torch.ones(3, 1, *TOKENS)
    assert all(x.shape[-1] != WIDTH for x in kept_by(lambda: ops.write(Live(tuple(rows), weights))))


def kept_by(operation: Callable[[], Any]) -> list[Tensor]:
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        operation()
    return kept


def test_autocast_rounds_nothing():
    history = [stream(2) for _ in range(3)]
    queries, weight = torch.randn(1, 2, WIDTH), torch.randn(WIDTH)
    gates = [GateParameters(*gate(2, 2)), GateParameters(*gate(2, 2)), GateParameters(*gate(1, 2))]

    def run() -> list[Tensor]:
        (found,) = ops.prefix(history, queries, **DUAL)
        first = ops.gated_read(found, None, query=None, gates=gates[:2], norm=Norm(weight, 1e-6), **DUAL)
        live = Live((history[0][0],), first[-1].coefficients)
        again = ops.gated_read(found, live, query=queries[0], gates=gates, norm=None, **DUAL)
        written = ops.write(Live((history[0][0], history[0][1]), again[-1].coefficients))
        return [first[0], first[-1].coefficients, again[0], again[-1].coefficients, written]

    plain = run()
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(run(), plain, strict=True))


def test_checkpointing_keeps_gradients():
    history = [stream(2) for _ in range(3)]
    queries = torch.randn(2, 2, WIDTH, requires_grad=True)

    def block(*history: Tensor) -> Tensor:
        first, second = ops.prefix(history, queries, **DUAL)
        return first.retrieved.square().sum() + second.retrieved.sum()

    plain = torch.autograd.grad(block(*history), [*history, queries])
    recomputed = torch.autograd.grad(checkpoint(block, *history, use_reentrant=False), [*history, queries])
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def test_kinds_by_device_and_dtype(monkeypatch: Any):
    monkeypatch.setattr(dispatch, "FORCED", None)
    assert dispatch.kind(torch.empty(1)) == "cpu"
    assert dispatch.kind(torch.empty(1, dtype=torch.bfloat16)) == "cpu"
    assert dispatch.kind(torch.empty(1, dtype=torch.float64)) == "reference"
    assert dispatch.kind(torch.empty(1, device="meta")) == "reference"
    assert dispatch.BY_DEVICE["cuda"] == "triton"
    monkeypatch.setattr(dispatch, "FORCED", "reference")
    assert dispatch.kind(torch.empty(1)) == "reference"


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: Any):
    monkeypatch.setattr(dispatch, "FORCED", "triton")
    for value in ("", "0"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        with pytest.raises(RuntimeError, match="also set TRITON_INTERPRET=1"):
            dispatch.kind(torch.empty(1))


def test_kernels_of_a_cpu_are_for_a_cpu(monkeypatch: Any):
    class Elsewhere:
        dtype, device, is_cpu, is_meta = torch.float32, torch.device("cuda"), False, False

    monkeypatch.setattr(dispatch, "FORCED", "cpu")
    with pytest.raises(RuntimeError, match="DUALRES_OPS=cpu is for CPUs, but the tensors are on cuda"):
        dispatch.kind(Elsewhere())  # type: ignore[arg-type]


def test_parameters_of_another_precision_are_rounded():
    """Such as those of a network that was made float64 and is given float32."""
    history, queries = [torch.randn(2, *TOKENS, WIDTH) for _ in range(3)], torch.randn(2, 2, WIDTH)
    found, wanted = (ops.prefix(history, q, **DUAL) for q in (queries.double(), queries))
    assert all(torch.equal(a.retrieved, b.retrieved) for a, b in zip(found, wanted, strict=True))


def test_derivatives_that_kernels_do_not_have_come_from_the_equations():
    """Forward-mode and `torch.func` would see constants otherwise."""
    history = [torch.randn(2, *TOKENS, WIDTH) for _ in range(3)]
    queries, direction = torch.randn(2, 2, WIDTH), torch.randn(2, 2, WIDTH)

    def retrieved(queries: torch.Tensor) -> torch.Tensor:
        return torch.stack([found.retrieved for found in ops.prefix(history, queries, **DUAL)])

    def slope(function: Any) -> torch.Tensor:
        return (function(queries + 1e-3 * direction) - function(queries - 1e-3 * direction)) / 2e-3

    found = torch.func.jvp(retrieved, (queries,), (direction,))[1]
    torch.testing.assert_close(found, slope(retrieved), rtol=1e-2, atol=1e-3)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(queries, direction)
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(retrieved(dual)).tangent, found)
    many = torch.func.vmap(retrieved)(torch.stack([queries, direction]))
    torch.testing.assert_close(many[1], retrieved(direction))


def test_inputs_that_do_not_fit_are_refused_by_name():
    """A kernel finds rows by address: what is too short it would read beyond its end."""
    rows, weights = [torch.randn(*TOKENS, WIDTH) for _ in range(3)], torch.randn(3, 2, *TOKENS)
    with pytest.raises(ValueError, match=r"history: all must have one shape.*torch.bfloat16.*torch.float32"):
        ops.prefix(
            [torch.randn(1, *TOKENS, WIDTH), torch.randn(1, *TOKENS, WIDTH).bfloat16()],
            torch.zeros(1, 1, WIDTH),
            **SINGLE,
        )
    with pytest.raises(ValueError, match=r"history: all must have one shape.*\(1, 1, 1, 5\)"):
        ops.prefix([torch.randn(1, *TOKENS, WIDTH), torch.randn(1, 1, 1, 5)], torch.zeros(1, 1, WIDTH), **SINGLE)
    with pytest.raises(ValueError, match=r"queries of shape \(1, 1, 24\).*width 16.*must have the shape \(1, 1, 16\)"):
        ops.prefix([torch.randn(1, *TOKENS, 16)], torch.zeros(1, 1, WIDTH), **SINGLE)
    with pytest.raises(ValueError, match="the route reads stream 1, but only 1 are stored"):
        ops.prefix([torch.randn(1, *TOKENS, WIDTH)], torch.zeros(1, 2, WIDTH), **DUAL)
    with pytest.raises(ValueError, match=r"the norm's weight of shape \(8,\).*must have the shape \(24,\)"):
        ops.rms_norm(rows[0][None], Norm(torch.ones(8), 1e-6))
    with pytest.raises(ValueError, match=r"the norm's weight .* on meta"):
        ops.rms_norm(rows[0][None], Norm(torch.ones(WIDTH, device="meta"), 1e-6))
    alpha, beta = (GateParameters(*(x.detach() for x in gate(2, 2))) for _ in range(2))
    stored = Prefix(torch.randn(2, *TOKENS, WIDTH), torch.randn(2, *TOKENS))
    one = Prefix(stored.retrieved[:1], stored.log_partition[:1])
    live = Live(tuple(rows), weights)
    wrong = (alpha, beta._replace(bias=torch.zeros(3)))
    with pytest.raises(ValueError, match=r"a gate's bias of shape \(3,\)"):
        ops.gated_read(stored, None, query=None, gates=wrong, norm=None, **DUAL)
    with pytest.raises(ValueError, match="the route has 2 output streams, but 1 are retrieved"):
        ops.gated_read(one, None, query=None, gates=(alpha, beta), norm=None, **DUAL)
    query = torch.randn(2, WIDTH)
    with pytest.raises(ValueError, match="expected 3 gates, got 2"):
        ops.gated_read(stored, live, query=query, gates=(alpha, beta), norm=None, **DUAL)
    with pytest.raises(ValueError, match="1 stored and 1 output streams: a read takes"):
        ops.gated_read(one, None, query=None, gates=(alpha, beta), norm=None, **SINGLE)
    with pytest.raises(ValueError, match="3 stored and 1 output streams: a read takes"):
        ops.read(one, Live(tuple(rows), torch.randn(3, 3, *TOKENS)), query=query[:1], norm=None, **SINGLE)
    with pytest.raises(ValueError, match="needs the coefficients of its updates, and queries"):
        ops.gated_read(stored, live, query=None, gates=(alpha, beta), norm=None, **DUAL)
    with pytest.raises(ValueError, match="takes constants: detach them"):
        ops.read(one, Live(tuple(rows), coefficients(3, 1)), query=query[:1], norm=None, **SINGLE)
    with pytest.raises(ValueError, match="do not fit 2 updates"):
        ops.write(Live(tuple(rows[:2]), weights))
    with pytest.raises(ValueError, match="updates: all must have one shape"):
        ops.write(Live((*rows[:2], rows[2][:, :1]), weights))
    short = Prefix(rows[0][None, :, :1], weights[:1, 0, :, :1])
    with pytest.raises(ValueError, match="retrieved state and updates: all must have one shape"):
        ops.read(short, live, query=torch.randn(1, WIDTH), norm=None, **SINGLE)


def test_without_its_compiler_a_kind_falls_back_with_a_note(monkeypatch: Any):
    monkeypatch.setattr(dispatch, "FORCED", None)
    monkeypatch.setattr(dispatch, "INSTALLED", {"cpu": False, "triton": True})
    monkeypatch.setattr(dispatch, "_noted", set())
    with pytest.warns(UserWarning, match=r"numba is not installed.*pip install -e '.\[cpu\]'.*pip install numba"):
        assert dispatch.kind(torch.empty(1)) == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        decoder = stirred(model_config(), ResidualConfig("dar-block"))
        assert torch.isfinite(decoder(random_tokens())).all()
    monkeypatch.setattr(dispatch, "_noted", set())  # a compiled model has nobody to tell
    compiled = torch.compile(decoder, fullgraph=True, backend="eager")
    assert torch.isfinite(compiled(random_tokens())).all()


def test_a_compiler_that_cannot_be_used_is_named(monkeypatch: Any):
    def broken(name: str) -> None:
        raise ImportError("Numba needs NumPy 2.4 or less")

    monkeypatch.setattr("importlib.import_module", broken)
    dispatch.module.cache_clear()
    with pytest.raises(ImportError, match=r"numba .*needs NumPy 2\.4.*DUALRES_OPS=reference"):
        dispatch.module("cpu")


@pytest.mark.parametrize("asked", ["reference", "cpu", "fast"])
def test_the_environment_forces_a_kind(asked: str):
    program = "import torch; from dualres.ops import dispatch; print(dispatch.kind(torch.empty(1)))"
    environment = {**os.environ, "DUALRES_OPS": asked}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    if asked == "fast":
        assert run.returncode != 0
        assert "DUALRES_OPS='fast' is unknown: use one of reference, cpu, triton" in run.stderr
    else:
        assert run.stdout.strip() == asked


def test_inputs_need_not_be_contiguous():
    history = [torch.randn(*TOKENS, 2, WIDTH).permute(2, 0, 1, 3) for _ in range(3)]
    queries = torch.randn(2, WIDTH, 2).permute(0, 2, 1)
    packed = [state.contiguous() for state in history]
    found, wanted = (ops.prefix(h, q, **DUAL) for h, q in ((history, queries), (packed, queries.contiguous())))
    pairs = [pair for one, other in zip(found, wanted, strict=True) for pair in zip(one[:2], other[:2], strict=True)]
    assert all(torch.equal(a, b) for a, b in pairs)
    live = torch.randn(1, 2, 1, WIDTH).expand(1, *TOKENS, WIDTH)  # one token for all
    norm = Norm(torch.randn(2 * WIDTH)[::2], 1e-6)
    alone = ops.rms_norm(live.contiguous(), Norm(norm.weight.contiguous(), 1e-6))
    assert torch.equal(ops.rms_norm(live, norm), alone)

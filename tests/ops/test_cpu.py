"""The CPU kernels' surroundings: threads that share tokens, kernels that are kept on disk, numbers at the edge."""

import itertools
import math
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from numba.core import event

from dualres import ops
from dualres.model.block import Recompute, recompute_blocks
from dualres.ops import GateParameters, Live, Norm, Prefix, autograd, cpu, reference
from dualres.ops.cpu import compiler, launch, pointers
from dualres.plan.activations import LiveBytes
from dualres.residual import route
from dualres.residual.live import appended
from tests.small import RESIDUALS, model_config, random_tokens, relative_error, stirred

ROOT = Path(__file__).parents[2]
OPERATORS = (autograd.prefix, autograd.read, autograd.hyper_read, autograd.write)


@pytest.fixture
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["pytorch's threads", "own threads"])
def either_kind(request: Any, monkeypatch: Any, three_threads: Any) -> None:
    """PyTorch's OpenMP threads, and those of a system where they cannot be reached."""
    for operator in OPERATORS:
        monkeypatch.setattr(operator, "plans", {})  # which pack how threads are reached
    if request.param == "own threads":
        monkeypatch.setattr(launch, "pytorch_threads", lambda: None)
    elif launch.pytorch_threads() is None:
        pytest.skip("PyTorch was not built with GNU's OpenMP")


@pytest.mark.parametrize("tokens", [0, 1, 47, 48, 49, 1000])
def test_a_kernel_takes_every_token_once(tokens: int, either_kind: Any):
    """Each token adds 1 to the gradient of the norm's weight."""
    stream, weight = torch.ones(1, 1, tokens, 7), torch.ones(7, requires_grad=True)
    found = ops.rms_norm(stream, Norm(weight, 0.0))
    found.sum().backward()
    assert torch.equal(found, torch.ones(1, tokens, 7))
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((7,), float(tokens)))


def test_a_kernel_runs_on_the_threads_of_pytorch(three_threads: Any, monkeypatch: Any):
    threads = launch.pytorch_threads()
    if threads is None:
        pytest.skip("PyTorch was not built with GNU's OpenMP")
    counts: list[int] = []

    def parallel(function: Any, job: Any, count: int, flags: int) -> None:
        counts.append(count)
        threads[0](function, job, count, flags)

    monkeypatch.setattr(launch, "pytorch_threads", lambda: (parallel, *threads[1:]))
    for tokens in (31, 32, 47, 300):
        ops.rms_norm(torch.ones(1, 1, tokens, 7), Norm(torch.ones(7), 0.0))
    assert counts == [2, 2, 3]


def gated(tokens: int, width: int) -> list[torch.Tensor]:
    """A read with gates and the gradients of its parameters."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in [(2, 2, width), (1,), (2,)] * 2]
    states, partition = torch.randn(2, 1, tokens, width, generator=generator), torch.zeros(2, 1, tokens)
    gates = [GateParameters(*leaves[:3]), GateParameters(*leaves[3:])]
    prefix, norm = Prefix(states, partition), Norm(torch.ones(width), 1e-5)
    h, *_, live = ops.gated_read(prefix, None, query=None, gates=gates, route=route.DUAL, eps=1e-6, norm=norm)
    return [h, *torch.autograd.grad(h.square().sum() + live.coefficients.sum(), leaves)]


def test_readers_do_not_disturb_each_other(either_kind: Any):
    """Each has its own scratch."""
    wanted = gated(200, 24)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: gated(200, 24), range(24)):
            assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(("name", "bound"), [("read", 1e-6), ("gated_read", 1e-6), ("hyper_read", 5e-6)])
def test_a_sum_over_many_tokens_keeps_its_digits(name: str, bound: float):
    """Where every token adds the same, a plain float32 sum of 100,000 is off by 1e-4 and more."""
    width, tokens = 5, 100_000
    streams, gate_sizes = {"read": (1, ()), "gated_read": (2, (2, 2, 1)), "hyper_read": (4, (4, 4, 16))}[name]
    numbers = torch.Generator().manual_seed(0)
    shapes = [(streams, width), (width,), *[s for n in gate_sizes for s in ((n, streams, width), (1,), (n,))]]
    parameters = [torch.randn(shape, generator=numbers) for shape in shapes]
    state, updates = (torch.randn(n, 1, 1, width, generator=numbers) for n in (streams, 1))
    coefficients = torch.ones(1, streams, 1, 1)
    if name == "hyper_read":  # mixing needs streams that are no multiples of each other
        updates, coefficients = (torch.randn(2, *x.shape[1:], generator=numbers) for x in (updates, coefficients))
    found = []
    for of, dtype, count in ((ops, torch.float32, tokens), (reference, torch.float64, 1)):
        query, weight, *rest = leaves = [parameter.to(dtype).requires_grad_() for parameter in parameters]
        gates = [GateParameters(*rest[n : n + 3]) for n in range(0, len(rest), 3)]
        history = state.to(dtype).expand(streams, 1, count, width).contiguous()
        prefix = Prefix(history, torch.zeros(streams, 1, count, dtype=dtype))
        rows = updates.to(dtype).expand(-1, 1, count, width).contiguous()
        live = Live(tuple(rows), coefficients.to(dtype).expand(-1, streams, 1, count).contiguous())
        own: Any = {"eps": 1e-6, "norm": Norm(weight, 1e-5)}
        if name == "gated_read":
            h, *_, after = of.gated_read(prefix, live, query=query, gates=gates, route=route.DUAL, **own)
        elif name == "hyper_read":
            h, after = of.hyper_read(live, gates=gates, steps=20, **own)
        else:
            h = of.read(prefix, live, query=query, route=route.SINGLE, **own)
            h, after = (h if of is reference else h[0]), live
        result = h[..., 0].sum() + after.coefficients[..., 0, :, :].sum()
        found.append(torch.autograd.grad(result, leaves[name == "hyper_read" :]))
    for ours, wanted in zip(*found, strict=True):
        assert relative_error(ours, tokens * wanted) < bound


def retrieved() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    history = [torch.randn(2, 1, 200, 24, generator=generator) for _ in range(3)]
    queries = torch.randn(1, 2, 24, generator=generator)
    with torch.no_grad():
        return ops.prefix(history, queries, route=route.DUAL, eps=1e-6)[0].retrieved


def test_callers_do_not_disturb_each_other(either_kind: Any):
    wanted = retrieved()
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(found, wanted) for found in pool.map(lambda _: retrieved(), range(24)))


def test_a_forked_process_can_go_on():
    """With one thread, as PyTorch's own operators can."""
    wanted = retrieved()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert torch.equal(pool.apply_async(retrieved).get(60), wanted)


def test_kernels_of_other_sources_are_forgotten(tmp_path: Path, monkeypatch: Any):
    """numba itself would go on with what a kernel's helpers were when it was compiled."""
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    kept = tmp_path / "kernels"
    (tmp_path / "tiles.py").write_text("one")
    compiler.remove_stale(kept)
    kernel = kept / "tiles.add.nbi"
    kernel.write_text("compiled")
    compiler.remove_stale(kept)
    assert kernel.exists()
    (tmp_path / "tiles.py").write_text("two")
    compiler.remove_stale(kept)
    assert not kernel.exists()


def test_kernels_are_kept_where_numba_is_told_to(tmp_path: Path):
    program = "from dualres.ops.cpu import compiler; print(compiler.cache_folder())"
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    kept = Path(run.stdout.strip())
    assert kept.is_relative_to(tmp_path)
    assert (kept / compiler.STAMP).exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_that_of_pytorch(dtype: torch.dtype):
    """Exactly: halves go to the even neighbour, what is too large to infinity, and NaN stays NaN."""
    cut = {torch.bfloat16: 16, torch.float16: 13}[dtype]  # bits
    one = 127 << (23 - cut)
    halves = (torch.arange(one - 500, one + 500, dtype=torch.int32) << cut) + (1 << (cut - 1))
    full_nan = torch.tensor([2**31 - 1], dtype=torch.int32)  # which a carry would turn into −0
    bits = torch.randint(0, 2**31 - 1, (4000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    odd = torch.tensor([0.0, math.inf, -math.inf, math.nan, 1e-40, 1e38, 3.4e38, 65519.0, 65520.0, 2.0**-25])
    numbers = torch.cat([*(x.view(torch.float32) for x in (halves, full_nan, bits)), odd])
    update, coefficients = torch.ones(1, numbers.numel(), 1, dtype=dtype), numbers.view(1, 1, 1, -1)
    found, wanted = ops.write(ops.Live((update,), coefficients)).flatten(), numbers.to(dtype)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[~found.isnan()], wanted[~wanted.isnan()])


def test_a_state_of_zeros_is_read_and_has_a_gradient():
    """Its norm is eps alone."""
    history = [torch.zeros(2, 1, 3, 24), torch.randn(2, 1, 3, 24)]
    queries = torch.randn(1, 2, 24)
    results = []
    for exact in (False, True):
        leaves = [(x.double() if exact else x.clone()).requires_grad_() for x in (queries, *history)]
        found = ops.prefix(leaves[1:], leaves[0], route=route.DUAL, eps=1e-2)[0].retrieved
        results.append([found, *torch.autograd.grad(found.square().sum(), leaves)])
    for ours, wanted in zip(*results, strict=True):
        assert relative_error(ours, wanted) < 1e-5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_seen(bad: float):
    """A loss that is not a number must not be hidden by a kernel."""
    history = [torch.randn(2, 1, 3, 24) for _ in range(3)]
    history[1][0, 0, 1, 5] = bad
    found = ops.prefix(history, torch.randn(1, 2, 24), route=route.DUAL, eps=1e-6)[0].retrieved
    assert torch.isfinite(found[:, 0, [0, 2]]).all()
    assert not torch.isfinite(found[:, 0, 1]).all()


def test_an_infinite_gradient_of_one_stream_is_passed_on():
    """A write takes streams in pairs, and the last of an odd number has no partner: 0 · ∞ would be NaN."""
    update = torch.randn(1, 3, 24, requires_grad=True)
    state = ops.write(Live((update,), torch.full((1, 1, 1, 3), 2.0)))
    (found,) = torch.autograd.grad(state, update, torch.full_like(state, math.inf))
    assert torch.equal(found, torch.full_like(found, math.inf))


def test_no_tokens():
    history = [torch.randn(2, 0, 3, 24, requires_grad=True) for _ in range(2)]
    queries = torch.randn(1, 2, 24, requires_grad=True)
    found = ops.prefix(history, queries, route=route.DUAL, eps=1e-6)[0].retrieved
    found.sum().backward()
    assert found.shape == (2, 0, 3, 24)
    assert queries.grad is not None
    assert not queries.grad.any()


def every_operator(width: int, place: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Results of all operators and their gradients, for inputs that `place` copies somewhere."""
    numbers = torch.Generator().manual_seed(width)
    shapes: list[tuple[int, ...]] = [*[(2, 1, 21, width)] * 3, (2, 2, width), *[(1, 21, width)] * 3, (width,)]
    shapes += [shape for values in (2, 2, 1) for shape in ((values, 2, width), (1,), (values,))]
    shapes += [shape for values in (3, 3, 9) for shape in ((values, 3, width), (1,), (values,))]
    leaves = [place(torch.randn(shape, generator=numbers)).requires_grad_() for shape in shapes]
    history, queries, updates = leaves[:3], leaves[3], leaves[4:7]
    norm, gates = Norm(leaves[7], 1e-5), [GateParameters(*leaves[n : n + 3]) for n in range(8, 26, 3)]
    both: Any = {"route": route.DUAL, "eps": 1e-6}
    prefix, _ = ops.prefix(history, queries, **both)
    h, prefix, live = ops.gated_read(prefix, None, query=None, gates=gates[:2], norm=norm, **both)
    live = appended(live, updates[0])
    again, _, live = ops.gated_read(prefix, live, query=queries[0], gates=gates[:3], norm=None, **both)
    results = [h, again, ops.write(appended(live, updates[1]))]
    prefix = ops.prefix([state[:1] for state in history], queries[:, :1], route=route.SINGLE, eps=1e-6)[0]
    live = Live(tuple(updates[:2]), torch.ones(2, 1, 1, 21))
    h, _, after = ops.read(prefix, live, query=queries[0, :1], route=route.SINGLE, norm=norm, eps=1e-6)
    assert after is not None
    results += [h, ops.write(after), ops.rms_norm(updates[0][None], norm)]
    live = Live((updates[0],), torch.ones(1, 3, 1, 21))
    h, live = ops.hyper_read(live, gates=gates[3:], steps=4, eps=1e-6, norm=norm)
    again, live = ops.hyper_read(appended(live, updates[1]), gates=gates[3:], steps=4, eps=1e-6, norm=None)
    results += [h, again, ops.write(appended(live, updates[2]))]
    return [*results, *torch.autograd.grad(torch.stack([x.square().sum() for x in results]).sum(), leaves)]


WIDTHS = (8, 16, 24, 33, 64, 100)


def test_results_do_not_depend_on_addresses():
    for width in WIDTHS:
        outcomes = set()
        for offset in (0, 1, 4, 7, 16):

            def moved(tensor: torch.Tensor, offset: int = offset) -> torch.Tensor:
                """A copy so many numbers behind the start of its memory, which PyTorch aligns."""
                memory = torch.empty(tensor.numel() + offset)
                return memory[offset:].view(tensor.shape).copy_(tensor)

            results = every_operator(width, moved)
            outcomes.add(b"".join(x.detach().numpy().tobytes() for x in results))
        assert len(outcomes) == 1, f"width {width}"


def test_nothing_is_written_beyond_a_result(monkeypatch: Any):
    """Every result and gradient that a kernel fills in lies within memory that stays as it was."""
    memories: list[tuple[torch.Tensor, int]] = []
    border = 64  # numbers on either side

    def within_borders(shape: tuple[int, ...], strides: tuple[int, ...], **kind: Any) -> torch.Tensor:
        count = math.prod(shape)
        memory = torch.full((count + 2 * border,), -7.0, **kind)
        memories.append((memory, count))
        return memory[border : border + count].view(shape)

    for operator in OPERATORS:
        monkeypatch.setattr(operator, "plans", {})  # which hold allocators
    monkeypatch.setattr(torch, "empty_strided", within_borders)
    for width in WIDTHS:
        wanted = [x.detach().clone() for x in every_operator(width, torch.clone)]
        assert all(x.isfinite().all() for x in wanted)
    assert len(memories) > 20 * len(WIDTHS)
    for memory, count in memories:
        assert (memory[:border] == -7).all()
        assert (memory[border + count :] == -7).all(), f"beyond {count} numbers"


@pytest.mark.parametrize(("function", "ours"), [(pointers.integers.py_func, True), (math.hypot, False)])
def test_a_kernel_that_is_compiled_is_logged(function: Any, ours: bool, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    caplog.clear()
    start = event.Event("numba:compile", event.EventStatus.START, {"dispatcher": SimpleNamespace(py_func=function)})
    event.broadcast(start)
    assert [record.getMessage()[:21] for record in caplog.records] == ["compiling CPU kernels"] * ours


PROGRAM = """
import hashlib, logging, torch
logging.basicConfig(level=logging.INFO)
from tests.small import RESIDUALS, gradients, model_config, next_token_loss, random_tokens, stirred

torch.set_num_threads(1)
decoder, tokens = stirred(model_config(layers=2, width=16, heads=2, kv_heads=1), RESIDUALS["dar-full"]), random_tokens()
next_token_loss(decoder(tokens), tokens).backward()
print(hashlib.sha256(b"".join(x.numpy().tobytes() for x in gradients(decoder).values())).hexdigest())
"""


@pytest.mark.slow
def test_a_process_that_compiles_gets_the_bits_of_one_that_loads(tmp_path: Path):
    """Only the first says that it compiles."""
    found = []
    for number in range(3):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, cwd=ROOT)
        assert run.returncode == 0, run.stderr
        assert ("compiling CPU kernels, once: they are cached in" in run.stderr) == (number == 0)
        found.append(run.stdout)
    assert len(set(found)) == 1


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("method", ["attnres-block", "dar-block", "dar-full"])
def test_retrieved_states_are_recomputed(method: str, recompute: Recompute, monkeypatch: Any):
    """For the backward pass, with the same bits; also in a second pass over the same graph."""
    decoder = stirred(model_config(), RESIDUALS[method])
    recompute_blocks(decoder, recompute)
    inputs, found = list(decoder.parameters()), []
    for from_bytes in (0, 2**40):
        monkeypatch.setattr(autograd, "RECOMPUTE_BYTES", from_bytes)
        with LiveBytes(inputs) as live:
            loss = decoder(random_tokens()).square().sum()
            kept = live.now
        passes = [torch.autograd.grad(loss, inputs, retain_graph=True) for _ in range(2)]
        found.append((kept, [gradient for each in passes for gradient in each]))
    (less, again), (more, saved) = found
    assert all(map(torch.equal, again, saved))
    assert less < more if recompute == "none" else less == more  # recomputed blocks save none anyway


def test_recomputed_states_are_checked_and_forgotten(monkeypatch: Any):
    """Partial passes leave nothing on the graph; what has changed since is noticed or saved."""
    monkeypatch.setattr(autograd, "RECOMPUTE_BYTES", 0)
    history = [torch.randn(1, 2, 3, 8, requires_grad=True) for _ in range(2)]
    queries, weight = torch.randn(1, 1, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    alone: Any = {"query": None, "route": route.SINGLE, "eps": 1e-6, "norm": Norm(weight, 1e-6)}
    (prefix,) = ops.prefix(history, queries, route=route.SINGLE, eps=1e-6)
    loss = ops.read(prefix, None, **alone)[0].square().sum()
    torch.autograd.grad(loss, [weight], retain_graph=True)
    node: Any = prefix.retrieved.grad_fn
    assert node.recomputed is None
    assert node.unpacked is None
    with torch.no_grad():
        queries.mul_(5.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, [history[0]])

    (prefix,) = ops.prefix(history, queries, route=route.SINGLE, eps=1e-6)
    with torch.no_grad():
        prefix.retrieved.mul_(3.0)
    found = torch.autograd.grad(ops.read(prefix, None, **alone)[0].square().sum(), [weight])
    own = prefix.retrieved.detach()
    wanted = torch.autograd.grad(ops.rms_norm(own, Norm(weight, 1e-6)).square().sum(), [weight])
    assert torch.equal(found[0], wanted[0])


def test_a_norm_that_does_not_fit_is_refused_without_gradients():
    with torch.no_grad():
        for stream, weight in [
            (torch.randn(1, 2, 3, 8), torch.ones(8, device="meta")),
            (torch.randn(1, 2, 3, 8), torch.ones(4)),
            (torch.randn(2, 2, 3, 8), torch.ones(8)),
        ]:
            with pytest.raises(ValueError, match=r"norm|stream"):
                ops.rms_norm(stream, Norm(weight, 1e-6))


def test_a_prepared_kernel_is_the_kernel(monkeypatch: Any):
    """With states and updates that occur twice, other threads, and gradients that are absent or not."""
    generator = torch.Generator().manual_seed(0)
    state, first = torch.randn(2, 1, 50, 20, generator=generator), torch.randn(1, 50, 20, generator=generator)
    parameters = [
        torch.randn(2, 2, 20),
        *[x for n in (2, 2, 1) for x in (torch.randn(n, 2, 20), torch.ones(1), torch.zeros(n))],
    ]
    leaves: list[Any] = [x.requires_grad_() for x in (state, first, *parameters)]
    queries, gates = parameters[0], [GateParameters(*parameters[n : n + 3]) for n in (1, 4, 7)]
    used: Any = {"route": route.DUAL, "eps": 1e-6}

    def gradients(weights: tuple[int, ...]) -> tuple[Any, Any]:
        prefix, other = ops.prefix([state, state, 2 * state], queries, **used)
        h, prefix, live = ops.gated_read(prefix, None, query=None, gates=gates[:2], norm=None, **used)
        live = appended(live, first)
        again, _, live = ops.gated_read(prefix, live, query=queries[0], gates=gates, norm=None, **used)
        results = [h, again, other.retrieved, ops.write(appended(live, first))]
        loss: Any = sum(weight * x.square().sum() for weight, x in zip(weights, results, strict=True) if weight)
        return [x.detach() for x in results], torch.autograd.grad(loss, leaves, allow_unused=True)

    def all_gradients() -> list[Any]:
        found = []
        before = torch.get_num_threads()
        for threads, weights in itertools.product((1, 2, 1), ((1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1))):
            torch.set_num_threads(threads)
            for _ in range(2):
                results, grads = gradients(weights)
                found += [*results, *[grad for grad in grads if grad is not None]]
        torch.set_num_threads(before)
        return found

    prepared = all_gradients()
    monkeypatch.delattr(cpu, "Prepared")
    for operator in (autograd.prefix, autograd.read, autograd.write):
        monkeypatch.setattr(operator, "plans", {})
    assert all(map(torch.equal, prepared, all_gradients()))


@pytest.mark.parametrize("few_first", [True, False])
def test_a_prepared_kernel_takes_a_gradient_of_one_stream_or_none(few_first: bool):
    stream, update, query = torch.randn(1, 1, 5, 7), torch.randn(1, 5, 7), torch.randn(1, 7)
    leaves: list[Any] = [x.double().requires_grad_() for x in (stream, update, query)]
    used: Any = {"route": route.SINGLE, "eps": 1e-6, "norm": None}

    def gradients(leaves: list[Any], few: bool) -> Any:
        stream, update, query = leaves
        live = Live((update,), torch.ones(1, 1, 1, 5, dtype=stream.dtype))
        h, prefix, after = ops.read(Prefix(stream, stream[..., 0]), live, query=query, **used)
        results = [h] if few else [h, ops.read(prefix, after, query=query, **used)[0], ops.write(cast(Live, after))]
        return torch.autograd.grad(cast(Any, sum(x.square().sum() for x in results)), leaves)

    for few in (few_first, not few_first):
        found = gradients([x.detach().float().requires_grad_() for x in leaves], few)
        assert all(relative_error(*pair) < 1e-5 for pair in zip(found, gradients(leaves, few), strict=True))


def test_what_a_kernel_is_prepared_with_is_not_counted():
    """It needs no memory."""
    stream, weight = torch.ones(1, 1, 61, 7), torch.ones(7)
    with LiveBytes([stream, weight]) as live:
        ops.read(
            Prefix(stream, stream[..., 0]), None, query=None, route=route.SINGLE, eps=1e-6, norm=Norm(weight, 1e-6)
        )
    assert live.peak < 2 * stream.nbytes

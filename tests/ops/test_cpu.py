"""The CPU kernels' surroundings: threads that share tokens, kernels that are kept on disk, numbers at the edge."""

import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numba.core import event

from dualres import ops
from dualres.ops.cpu import compiler, launch, rows
from dualres.residual import route
from tests.small import relative_error

ROOT = Path(__file__).parents[2]


@pytest.fixture
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["pytorch's threads", "own threads"])
def either_kind(request: Any, monkeypatch: Any, three_threads: Any) -> None:
    """PyTorch's OpenMP threads, and those of a system where they cannot be reached."""
    if request.param == "own threads":
        monkeypatch.setattr(launch, "pytorch_threads", lambda: None)
    elif launch.pytorch_threads() is None:
        pytest.skip("PyTorch was not built with GNU's OpenMP")


@pytest.mark.parametrize("tokens", [0, 1, 47, 48, 49, 1000])
def test_every_token_is_worked_on_once(tokens: int, either_kind: Any):
    seen: list[tuple[int, int, int]] = []
    launch.parallel_for(lambda *part: seen.append(part), tokens)
    assert len(seen) == launch.parts(tokens)
    assert [t for _, first, last in sorted(seen) for t in range(first, last)] == list(range(tokens))


def test_parts_run_at_the_same_time(either_kind: Any):
    """Each waits for the others, and on another thread."""
    together, names = threading.Barrier(3, timeout=30), set()

    def work(part: int, first: int, last: int) -> None:
        together.wait()
        names.add(threading.get_ident())

    launch.parallel_for(work, 300)
    assert len(names) == 3


def test_a_failure_reaches_the_caller(either_kind: Any):
    def work(part: int, first: int, last: int) -> None:
        if part == 1:
            raise ZeroDivisionError("part 1")

    with pytest.raises(ZeroDivisionError, match="part 1"):
        launch.parallel_for(work, 300)


def test_a_failure_waits_for_the_other_parts(either_kind: Any):
    """They write to memory that the caller may free."""
    done = []

    def work(part: int, first: int, last: int) -> None:
        if part == 0:
            raise ZeroDivisionError("part 0")
        time.sleep(0.2)
        done.append(part)

    with pytest.raises(ZeroDivisionError):
        launch.parallel_for(work, 300)
    assert sorted(done) == [1, 2]


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
    (tmp_path / "rows.py").write_text("one")
    compiler.remove_stale(kept)
    kernel = kept / "rows.add.nbi"
    kernel.write_text("compiled")
    compiler.remove_stale(kept)
    assert kernel.exists()
    (tmp_path / "rows.py").write_text("two")
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


def test_no_tokens():
    history = [torch.randn(2, 0, 3, 24, requires_grad=True) for _ in range(2)]
    queries = torch.randn(1, 2, 24, requires_grad=True)
    found = ops.prefix(history, queries, route=route.DUAL, eps=1e-6)[0].retrieved
    found.sum().backward()
    assert found.shape == (2, 0, 3, 24)
    assert queries.grad is not None
    assert not queries.grad.any()


def gaps(count: int, width: int, gap: int) -> list[Any]:
    """Rows that lie so many numbers apart."""
    return [row[:width] for row in np.zeros((count, width + gap), np.float32)]


ONE, TWO = np.float32(0.7), np.float32(1.3)
SUMS: dict[str, tuple[int, Any]] = {  # functions that write a row and sum over it: how many rows they take, how
    "load_with_dots": (4, lambda into, row, a, b: rows.load_with_dots(into, row, a, b)),
    "blend": (3, lambda into, row, other: rows.blend(into, ONE, row, TWO, other)),
    "blend_with_dots": (7, lambda into, row, other, *four: rows.blend_with_dots(into, ONE, row, TWO, other, four)),
    "normalize_backward": (4, lambda given, row, w, d_w: rows.normalize_backward(given, row, w, ONE, 1e-6, d_w)),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_do_not_depend_on_addresses(name: str):
    """Where rows lie close together, LLVM would take another loop, which adds up in another order."""
    count, call = SUMS[name]
    generator = np.random.default_rng(0)
    for width in (8, 16, 24, 33, 63, 64, 100):
        numbers = generator.standard_normal((count, width)).astype(np.float32)
        outcomes = set()
        for places in (gaps(count, width, 1000), gaps(count, width, 0), gaps(count, width, 0)[::-1]):
            for place, row in zip(places, numbers, strict=True):
                place[:] = row
            outcomes.add((call(*places), *(place.tobytes() for place in places)))
        assert len(outcomes) == 1, f"width {width}"


@pytest.mark.parametrize(("function", "ours"), [(rows.load_with_dots.py_func, True), (math.hypot, False)])
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

"""A block of few tokens without gradients: the calls of its kernels are recorded once and give the same bits."""

import copy
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualres.analyze.taps import replacing
from dualres.model.block import NormedBranch, compile_blocks, residual_stack
from dualres.model.decoder import Decoder
from dualres.ops import dispatch
from dualres.residual.dar import Dual
from tests.small import RESIDUALS, model_config, random_tokens, stirred

session: Any = importlib.import_module("dualres.ops.cpu.session")
WITH = ["attnres-block", "attnres-full", "dar-block", "dar-full", "dar-selfkv", "dar-fixedkv", "dar-crossv"]


@pytest.fixture(autouse=True)
def passes(monkeypatch: Any) -> list[Any]:
    """The passes of this test, in order."""
    seen: list[Any] = []
    build = session.Session

    def counted(*arguments: Any) -> Any:
        seen.append(build(*arguments))
        return seen[-1]

    monkeypatch.setattr(dispatch, "FORCED", "cpu")
    monkeypatch.setattr(session, "Session", counted)
    return seen


def logits(decoder: Decoder, tokens: Tensor, gradients: bool = False) -> Tensor:
    with torch.set_grad_enabled(gradients):
        return decoder(tokens).detach()


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (31, 1)])
@pytest.mark.parametrize("method", WITH)
def test_bits(method: str, shape: tuple[int, int], passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS[method]), random_tokens(*shape)
    wanted = logits(decoder, tokens, gradients=True)
    assert not passes
    assert torch.equal(logits(decoder, tokens), wanted)
    first = len(passes)
    assert first >= len(decoder.stack) - 1  # the first block of some methods has no query for its first branch
    assert torch.equal(logits(decoder, tokens), wanted)
    assert [one.program for one in passes[:first]] == [one.program for one in passes[first:]]


@pytest.mark.parametrize("method", ["standard", "mhc-2", "attnres-vproj"])
def test_methods_without(method: str, passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS[method]), random_tokens(1, 2)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert not passes


def test_many_tokens(passes: list[Any]):
    decoder = stirred(model_config(), RESIDUALS["dar-block"])
    assert logits(decoder, random_tokens(32, 1)).shape == (32, 1, 97)
    assert not passes


def changed(decoder: Decoder, how: str) -> Decoder:
    """The decoder after a pass, with other parameters."""
    with torch.no_grad():
        for name, parameter in list(decoder.named_parameters()):
            other = parameter + 0.1 * torch.ones_like(parameter).flatten().cumsum(0).view_as(parameter).cos()
            if how == "in place":
                parameter.copy_(other)
            elif how == "data":
                parameter.data = other
            else:
                parent, _, own = name.rpartition(".")
                setattr(decoder.get_submodule(parent), own, nn.Parameter(other))
    return decoder


@pytest.mark.parametrize("how", ["in place", "data", "parameter"])
def test_parameters_that_change(how: str, passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    before = logits(decoder, tokens)
    now = logits(changed(decoder, how), tokens)
    assert not torch.equal(now, before)
    assert torch.equal(now, logits(decoder, tokens, gradients=True))
    assert len(passes) == 2 * len(decoder.stack)


def test_a_norm_that_is_replaced():
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    before = logits(decoder, tokens)
    branch: Any = next(iter(decoder.stack)).branches[1]
    branch.norm = nn.RMSNorm(32, eps=0.5)
    assert not torch.equal(logits(decoder, tokens), before)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype, passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    logits(decoder, tokens)
    made = len(passes)
    other = copy.deepcopy(decoder).to(dtype)
    assert torch.equal(logits(other, tokens), logits(other, tokens, gradients=True))
    assert len(passes) == made


def test_branches_in_bfloat16(passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert passes


def test_threads_do_not_disturb_each_other(passes: list[Any]):
    decoder = stirred(model_config(), RESIDUALS["dar-block"])
    inputs = [random_tokens(2, 3, seed=n) for n in range(24)]
    wanted = [logits(decoder, tokens) for tokens in inputs]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda tokens: logits(decoder, tokens), inputs))
    assert all(map(torch.equal, found, wanted))
    assert passes


def test_earlier_results_stay():
    """Each pass has memory of its own."""
    decoder, seen = stirred(model_config(), RESIDUALS["dar-block"]), []
    module: Any = next(iter(decoder.stack)).branches[0]
    module.module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits(decoder, random_tokens(1, 2))
    first = seen[0].clone()
    logits(decoder, random_tokens(1, 2, seed=1))
    assert torch.equal(seen[0], first)
    assert not torch.equal(seen[1], first)


class Doubling(Dual):
    """A user's own DAR."""

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        return super().write(state, i, 2 * update)


def test_a_subclass_goes_its_own_way(passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    before = logits(decoder, tokens)
    made = len(passes)
    for block in decoder.stack:
        block.pathway.__class__ = Doubling
    assert not torch.equal(logits(decoder, tokens), before)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert len(passes) == made


def test_branches_without_a_norm_of_ours(passes: list[Any]):
    generator = torch.manual_seed(0)
    branches = [nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 12)) for _ in range(4)]
    stack, x = residual_stack(branches, 12, RESIDUALS["dar-block"]), torch.randn(1, 3, 12, generator=generator)
    with torch.no_grad():
        found = stack(x)
    assert torch.equal(found, stack(x))
    assert not passes


def test_a_branch_that_returns_its_input(passes: list[Any]):
    branches = [NormedBranch(nn.RMSNorm(12, eps=1e-6), nn.Identity()) for _ in range(4)]
    stack, x = residual_stack(branches, 12, RESIDUALS["dar-block"]), torch.randn(1, 3, 12)
    with torch.no_grad():
        found = stack(x)
    assert torch.equal(found, stack(x))
    assert passes


def test_taps_see_every_state(passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(1, 3)
    plain = logits(decoder, tokens)
    made = len(passes)
    with replacing(next(iter(decoder.stack)), 1, lambda streams: 0 * streams), torch.no_grad():
        assert not torch.equal(decoder(tokens), plain)
    assert len(passes) == made + len(decoder.stack) - 1


def test_compiled_blocks(passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(1, 3)
    compile_blocks(decoder, backend="eager")
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert not passes

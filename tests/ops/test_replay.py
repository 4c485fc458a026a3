"""A block of few tokens without gradients: its kernel calls are recorded once, and replays give the same bits."""

import copy
import importlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.utils import parametrize, prune

from dualres.analyze.taps import replacing
from dualres.config.schema import ResidualConfig
from dualres.model.block import NormedBranch, ResidualBlock, compile_blocks, input_norm, residual_stack
from dualres.model.decoder import Decoder
from dualres.ops import Route, dispatch
from dualres.residual.dar import Dual
from dualres.residual.pathway import Place
from tests.small import RESIDUALS, model_config, random_tokens, relative_error, stirred

replay: Any = importlib.import_module("dualres.ops.cpu.replay")
WITH = ["attnres-block", "attnres-full", "dar-block", "dar-full", "dar-selfkv", "dar-fixedkv", "dar-crossv"]


@pytest.fixture(autouse=True)
def passes(monkeypatch: Any) -> list[Any]:
    """The passes of this test, in order."""
    seen: list[Any] = []
    build = replay.Replay

    def counted(*arguments: Any) -> Any:
        seen.append(build(*arguments))
        return seen[-1]

    monkeypatch.setattr(dispatch, "FORCED", "cpu")
    monkeypatch.setattr(replay, "Replay", counted)
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
    assert [one.recording for one in passes[:first]] == [one.recording for one in passes[first:]]


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


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def changed_places(decoder: Decoder, where: str) -> list[nn.Module]:
    pathways: list[Any] = [block.pathway for block in decoder.stack]
    if where == "norm":
        return [cast(Any, branch).norm for block in decoder.stack for branch in block.branches]
    return [pathway.queries if where == "queries" else pathway.gates[0].beta for pathway in pathways]


@pytest.mark.parametrize("where", ["norm", "queries", "gate"])
def test_parametrizations(where: str, passes: list[Any]):
    """Their values are temporary tensors."""
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    before = logits(decoder, tokens)
    made = len(passes)
    for module in changed_places(decoder, where):
        parametrize.register_parametrization(module, "weight", Twice())
    assert not torch.equal(logits(decoder, tokens), before)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert len(passes) == made


def test_a_pruned_gate():
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    for gate in changed_places(decoder, "gate"):
        prune.l1_unstructured(gate, "weight", 0.5)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))


class OwnGate(nn.Module):
    """Any module with the tensors of a gate."""

    def __init__(self, gate: Any):
        super().__init__()
        self.bias, self.scale, self.weight = gate.bias, gate.scale, gate.weight


def test_gates_of_another_class():
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    wanted = logits(decoder, tokens)
    for block in decoder.stack:
        gates: Any = block.pathway
        for own in gates.gates:
            own.alpha = OwnGate(own.alpha)  # also changes their order
    assert torch.equal(logits(decoder, tokens), wanted)
    assert torch.equal(logits(decoder, tokens, gradients=True), wanted)


def test_hooks_and_patches(passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    plain = logits(decoder, tokens)
    made = len(passes)
    blocks: list[Any] = list(decoder.stack)
    hooks = [block.pathway.queries.register_forward_hook(lambda *call: 3 * call[-1]) for block in blocks]
    assert not torch.equal(logits(decoder, tokens), plain)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    for hook, block in zip(hooks, blocks, strict=True):
        hook.remove()
        block.pathway.write = partial(lambda write, state, i, update: write(state, i, 2 * update), block.pathway.write)
    assert not torch.equal(logits(decoder, tokens), plain)
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert len(passes) == made


class Inheriting(Dual):
    """Changes nothing about reads and writes, like the classes that FSDP2 makes."""


def test_a_subclass_that_changes_nothing(passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["dar-block"]), random_tokens(2, 2)
    for block in decoder.stack:
        block.pathway.__class__ = Inheriting
    assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
    assert len(passes) == len(decoder.stack)


def test_a_state_that_occurs_twice():
    block: Any = stirred(model_config(), RESIDUALS["dar-block"]).stack.blocks[1]
    branches = [NormedBranch(nn.RMSNorm(32, eps=1e-6), nn.Linear(32, 32)) for _ in block.branches]
    own = ResidualBlock(branches, block.pathway)
    for seed in range(3):
        state = torch.randn(2, 1, 3, 32, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            found = own(state, state)[0]
        assert torch.equal(found, own(state, state)[0])


def test_an_update_that_is_still_on_its_way(passes: list[Any]):
    """A branch of a user may return the result of a collective without waiting for it."""

    class Branch(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return AsyncCollectiveTensor(super().forward(x))

    torch.manual_seed(0)
    branches = [NormedBranch(nn.RMSNorm(12, eps=1e-6), Branch(12, 12)) for _ in range(8)]
    stack, x = residual_stack(branches, 12, RESIDUALS["dar-block"]), torch.randn(1, 3, 12)
    with torch.no_grad():
        assert relative_error(stack(x), stack(x)) == 0
        found = stack(x)
    assert torch.equal(found, stack(x))
    assert passes


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_default_dtype(dtype: torch.dtype, passes: list[Any]):
    decoder, tokens = stirred(model_config(), RESIDUALS["attnres-block"]), random_tokens(2, 2)
    wanted = logits(decoder, tokens, gradients=True)
    replay._recordings.clear()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        block: Any = next(iter(decoder.stack))
        state = torch.ones(1, 1, 2, 32, dtype=torch.float32)
        with torch.no_grad():
            made = block.pathway.replay((state,), [input_norm(branch) for branch in block.branches])
            made.open((state,))
            assert made.read(None, 0)[0].dtype is torch.float32
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(logits(decoder, tokens), wanted)


def test_wrong_shapes_are_refused():
    decoder = stirred(model_config(), RESIDUALS["dar-block"])
    block: Any = decoder.stack.blocks[1]
    with torch.no_grad():
        with pytest.raises(ValueError, match="history"):
            block(torch.randn(2, 1, 3, 32), torch.randn(2, 1, 4, 32))
        with pytest.raises(ValueError, match="width"):
            block(torch.randn(2, 1, 3, 31), torch.randn(2, 1, 3, 31))
        with pytest.raises(ValueError, match="history is empty"):
            block()
        logits(decoder, random_tokens(2, 2))
        norm = block.branches[0].norm
        norm.weight = nn.Parameter(norm.weight.data[:4])
        with pytest.raises(ValueError, match="norm"):
            logits(decoder, random_tokens(2, 2))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("axes", [(), (3,), (2, 2, 3)])
def test_axes_of_tokens_and_parameters_of_every_branch(axes: tuple[int, ...], share: bool, passes: list[Any]):
    torch.manual_seed(0)
    branches = [NormedBranch(nn.RMSNorm(12, eps=1e-6), nn.Linear(12, 12)) for _ in range(9)]
    config = ResidualConfig("dar-block", branches_per_block=3, share_parameters=share)
    stack, x = residual_stack(branches, 12, config), torch.randn(*axes, 12)
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
        found = stack(x)
    assert torch.equal(found, stack(x))
    assert passes


def test_a_route_of_lists():
    place = Place(2, (0, 1, 0, 1))
    pathway = Dual(12, place, eps=1e-6, gate_scale=1.0, rho_bias=2.0, route=Route([1, 0], [0, 1]))
    block = ResidualBlock([NormedBranch(nn.RMSNorm(12, eps=1e-6), nn.Linear(12, 12)) for _ in range(4)], pathway)
    history = torch.randn(2, 1, 3, 12), torch.randn(2, 1, 3, 12)
    with torch.no_grad():
        found = block(*history)[0]
    assert torch.equal(found, block(*history)[0])


def test_few_recordings_are_remembered(monkeypatch: Any):
    monkeypatch.setattr(replay, "MAX_RECORDINGS", 4)
    replay._recordings.clear()
    decoder = stirred(model_config(), RESIDUALS["dar-full"])
    for length in range(1, 5):
        tokens = random_tokens(1, length)
        assert torch.equal(logits(decoder, tokens), logits(decoder, tokens, gradients=True))
        assert len(replay._recordings) <= 4

"""A stack of branches of your own, and the keyword arguments that each of them gets."""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dualres.model.block import NormedBranch, ResidualStack, compile_blocks, recompute_blocks, residual_stack

WIDTH = 8


class Masked(nn.Module):
    """Takes a mask, and a factor by name only."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, mask: Tensor | None = None, *, factor: float = 1.0) -> Tensor:
        return torch.tanh(self.map(h if mask is None else h * mask)) * factor


class Plain(nn.Module):
    """Takes nothing but its input."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h))


class Anything(nn.Module):
    """A wrapper as a library writes it: takes everything and passes it on."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.seen: list[str] = []

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = sorted(kwargs)
        return self.inner(*args, **kwargs)


def normed(module: nn.Module) -> NormedBranch:
    return NormedBranch(nn.RMSNorm(WIDTH, eps=1e-6), module)


def stack_of(*wrap: Callable[[nn.Module], Any]) -> ResidualStack:
    """Two layers of two branches, each wrapped."""
    torch.manual_seed(0)
    branches: list[nn.Module] = []
    for _ in range(2):
        for branch in (Masked(), Plain()):
            for each in wrap:
                branch = each(branch)
            branches.append(branch)
    stack = residual_stack(branches, WIDTH, "dar-block")
    with torch.no_grad():
        for name, parameter in stack.named_parameters():
            if "pathway" in name or "readout" in name:
                parameter.normal_(std=0.5)
    return stack


def inputs() -> tuple[Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    x, mask = torch.randn(2, 3, WIDTH, generator=generator), torch.rand(2, 3, 1, generator=generator)
    return x, {"mask": mask, "factor": 2.0}


def by_hand() -> Tensor:
    """What the stack should compute: the branches with their keywords already applied."""

    class Applied(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, h: Tensor) -> Tensor:
            return self.inner(h, **(inputs()[1] if isinstance(self.inner, Masked) else {}))

    return stack_of(Applied)(inputs()[0])


def eager(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager", fullgraph=True)


def hooked(module: nn.Module) -> nn.Module:
    """As accelerate hooks a module: an instance's forward that takes anything and names the one it wraps."""
    original = module.forward
    module.forward = functools.wraps(original)(lambda *args, **kwargs: original(*args, **kwargs))
    return module


def sharded(stack: ResidualStack) -> ResidualStack:
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    mesh = init_device_mesh("cpu", (1,))
    for block in stack:
        fully_shard(block, mesh=mesh)
    fully_shard(stack, mesh=mesh)
    return stack


def with_compiled_blocks(stack: ResidualStack) -> ResidualStack:
    compile_blocks(stack, backend="eager", fullgraph=True)
    return stack


def recomputed(stack: ResidualStack) -> ResidualStack:
    recompute_blocks(stack, "full")
    return stack


@pytest.fixture
def _one_process() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize(
    "change",
    [
        lambda stack: stack,
        copy.deepcopy,
        lambda stack: pickle.loads(pickle.dumps(stack)),
        recomputed,
        with_compiled_blocks,
        eager,
        sharded,
    ],
    ids=["plain", "copied", "pickled", "recomputed", "compiled blocks", "compiled", "FSDP2"],
)
def test_each_branch_gets_what_it_takes(change: Callable[[ResidualStack], Any]):
    x, context = inputs()
    with torch._dynamo.config.patch(), torch._functorch.config.patch():
        assert torch.equal(change(stack_of())(x, **context), by_hand())


@pytest.mark.parametrize(
    "wrap",
    [(eager,), (checkpoint_wrapper,), (eager, checkpoint_wrapper), (checkpoint_wrapper, eager), (hooked,)],
    ids=["compiled", "checkpointed", "checkpointed compiled", "compiled checkpointed", "hooked"],
)
def test_wrapped_branches(wrap: tuple[Any, ...]):
    x, context = inputs()
    assert torch.equal(stack_of(*wrap)(x, **context), by_hand())


def test_branches_with_a_norm():
    """In a block, the module is called; wrapped as a whole, the branch is."""
    x, context = inputs()
    assert torch.allclose(stack_of(normed)(x, **context), stack_of(normed, eager)(x, **context), atol=1e-6)


def test_a_branch_wrapped_later_keeps_its_keywords():
    x, context = inputs()
    stack = stack_of()
    for block in stack:
        block.branches = nn.ModuleList(Anything(branch) for branch in block.branches)
    assert torch.equal(stack(x, **context), by_hand())
    assert [branch.seen for block in stack for branch in block.branches] == [["factor", "mask"], []] * 2


def test_a_branch_with_open_keywords_takes_all():
    x, context = inputs()
    stack = residual_stack([Anything(Masked()), Plain()], WIDTH, "standard")
    stack(x, **context)
    assert next(iter(stack)).branches[0].seen == ["factor", "mask"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'msk'"):  # the branch's own error
        stack(x, msk=1)


def test_an_input_of_another_width():
    with pytest.raises(ValueError, match="the input has width 9, but the stack was built with width 8"):
        stack_of()(torch.zeros(2, 3, 9))


def test_blocks_of_a_whole_model():
    stack = stack_of()
    model = nn.Sequential(stack, nn.Linear(WIDTH, WIDTH))
    recompute_blocks(model, "selective")
    assert [block.recompute for block in stack] == ["selective"] * len(stack)
    with pytest.raises(ValueError, match=r"'fulll'.*use 'none', 'selective' or 'full'"):
        recompute_blocks(model, "fulll")  # type: ignore[arg-type]
    for change in (compile_blocks, lambda none: recompute_blocks(none, "full")):
        with pytest.raises(ValueError, match="Linear has no residual blocks"):
            change(nn.Linear(1, 1))


def test_branches_from_a_generator():
    assert len(residual_stack((Plain() for _ in range(4)), WIDTH, "standard")) == 2


def test_a_keyword_that_no_branch_takes():
    x, context = inputs()
    with pytest.raises(TypeError, match=r"'msk' \(they take mask, factor\): did you mean mask\?"):
        stack_of()(x, msk=context["mask"])
    with pytest.raises(TypeError, match=r"'positions' \(they take mask, factor\): remove it"):
        stack_of()(x, positions=1)
    with pytest.raises(TypeError, match=r"'h' \(they take none\)"):  # the input is not a keyword
        residual_stack([Plain(), Plain()], WIDTH, "standard")(x, h=1)

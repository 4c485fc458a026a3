"""What every pathway promises: nothing changed in place, nothing kept, nothing unused, and inspectable streams."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dualres.config.schema import ConfigError, ResidualConfig
from dualres.model.block import ResidualStack, residual_stack
from dualres.ops import Norm
from dualres.residual import registry
from dualres.residual.pathway import Pathway, Place
from tests.small import (
    FEEDFORWARDS,
    RESIDUALS,
    gradients,
    model_config,
    next_token_loss,
    random_tokens,
    relative_error,
    stirred,
)

BATCH, LENGTH, WIDTH = 3, 5, 11


class Turn(nn.Module):
    """A branch that is cheap and not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.map(h))


def stack(residual: ResidualConfig, branches: int = 10) -> ResidualStack:
    torch.manual_seed(0)
    made = residual_stack([Turn() for _ in range(branches)], WIDTH, residual)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made


@pytest.mark.parametrize("name", RESIDUALS)
def test_history_is_never_changed_in_place(name: str):
    made = stack(RESIDUALS[name])
    history: tuple[Tensor, ...] = (torch.randn(made.streams, BATCH, LENGTH, WIDTH),)
    for block in made:
        copies = [state.clone() for state in history]
        before = {key: repr(value) for key, value in vars(block.pathway).items()}
        first, again = block(*history)[0], block(*history)[0]
        assert torch.equal(first, again)
        assert first.is_contiguous()
        assert first.shape == history[0].shape
        assert all(torch.equal(a, b) for a, b in zip(history, copies, strict=True))
        assert {key: repr(value) for key, value in vars(block.pathway).items()} == before
        history = (*history, first.detach()) if block.pathway.keeps_history else (first.detach(),)


@pytest.mark.parametrize("name", RESIDUALS)
def test_tokens_do_not_see_each_other(name: str):
    """A pathway works on each token alone, so decoding and sequence parallelism need nothing from it."""
    made = stack(RESIDUALS[name]).double()
    embedding = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    whole = made(embedding)
    parts = torch.cat([made(embedding[:, :2]), made(embedding[:, 2:])], 1)
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-9)


class Watch(Pathway):
    """A tap: the pathway it wraps, with a look at the live streams after every write, or a change to them."""

    def __init__(self, wrapped: Pathway, change: Any = None):
        super().__init__()
        self.wrapped, self.change = wrapped, change
        self.keeps_history = wrapped.keeps_history
        self.seen: list[Tensor] = []

    def open(self, history: tuple[Tensor, ...]) -> Any:
        return self.wrapped.open(history)

    def read(self, state: Any, i: int, norm: Norm | None = None) -> tuple[Tensor, Any]:
        return self.wrapped.read(state, i, norm)

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        state = self.wrapped.write(state, i, update)
        live = self.wrapped.streams(state)
        assert live is not None
        self.seen.append(live)
        return self.wrapped.with_streams(state, self.change(live)) if self.change else state

    def close(self, state: Any) -> Tensor:
        return self.wrapped.close(state)


@pytest.mark.parametrize("name", RESIDUALS)
def test_watching_changes_no_bit_and_intervening_does(name: str):
    made, embedding = stack(RESIDUALS[name]), torch.randn(BATCH, LENGTH, WIDTH)
    plain = made(embedding)
    originals = [block.pathway for block in made]
    for block in made:
        block.pathway = Watch(block.pathway)
    assert torch.equal(made(embedding), plain)
    for block in made:
        assert isinstance(block.pathway, Watch)
        assert len(block.pathway.seen) == len(block.branches)
        assert block.pathway.seen[0].shape == (made.streams, BATCH, LENGTH, WIDTH)
    for block, original in zip(made, originals, strict=True):
        block.pathway = Watch(original, change=torch.zeros_like)
    assert not torch.allclose(made(embedding), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RESIDUALS)
def test_watching_a_decoder_changes_no_bit(name: str, dtype: torch.dtype):
    """Its reads apply the norms of its branches."""
    decoder, tokens = stirred(model_config(), RESIDUALS[name]).to(dtype), random_tokens()
    plain = decoder(tokens)
    for block in decoder.stack:
        block.pathway = Watch(block.pathway)
    assert torch.equal(decoder(tokens), plain)


@pytest.mark.axes(method="dar-block", branches_per_block=4, shared=True, layers=5)
@pytest.mark.parametrize("layers", [1, 2, 5])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("branches_per_block", [2, 4, 6, 10])
@pytest.mark.parametrize(
    "method", [name for name, row in registry.METHODS.items() if hasattr(row.options, "share_parameters")]
)
def test_every_parameter_is_used(method: str, branches_per_block: int, shared: bool, layers: int):
    """DDP refuses a parameter that no forward pass uses; a query without a choice and a ρ without a state would be."""
    config = ResidualConfig(method, branches_per_block=branches_per_block, share_parameters=shared)
    if branches_per_block > 2 * layers:
        with pytest.raises(ConfigError, match="at most"):
            stack(config, 2 * layers)
        return
    made = stack(config, 2 * layers)
    made(torch.randn(BATCH, LENGTH, WIDTH)).square().sum().backward()
    unused = [n for n, p in made.named_parameters() if p.grad is None or not p.grad.any()]
    assert not unused


@pytest.mark.axes(name="dar-block", feedforward="dense")
@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("name", RESIDUALS)
def test_every_decoder_parameter_gets_a_gradient(name: str, feedforward: str):
    decoder, tokens = stirred(model_config(feedforward), RESIDUALS[name]), random_tokens()
    next_token_loss(decoder(tokens), tokens).backward()
    gradients(decoder)  # asserts that none is missing


def test_places():
    """Four branches per block, five layers: the last block is shorter; two sets serve the alternating branches."""
    blocks = registry.places(10, ResidualConfig("dar-block", branches_per_block=4))
    assert blocks == [Place(1, (0, 1, 0, 1)), Place(2, (0, 1, 0, 1)), Place(3, (0, 1))]
    assert blocks[0].sets_with_query() == {0, 1}
    assert blocks[2].sets_with_live_state() == {1}
    full = registry.places(4, ResidualConfig("dar-full"))
    assert (full[0].sets_with_query(), full[1].sets_with_query()) == ({1}, {0, 1})
    own = registry.places(4, ResidualConfig("attnres-block", branches_per_block=4, share_parameters=False))
    assert own == [Place(1, (0, 1, 2, 3))]


def test_one_dar_branch_per_block_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"branches_per_block=1\).*collinear.*Use a branches_per_block ≥ 2"):
        stack(ResidualConfig("dar-full", branches_per_block=1))


def test_a_foreign_option_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"residual\.rho_bias=1\.0 is not an option of attnres-block \(its options: share_parameters\)",
    ):
        stack(ResidualConfig("attnres-block", rho_bias=1.0))


def test_streams_keep_their_dtype():
    """Branches that answer in another precision, as under autocast, do not change what the history is stored in."""

    class Low(Turn):
        def forward(self, h: Tensor) -> Tensor:
            return super().forward(h).bfloat16()

    states: list[Tensor] = []
    for residual in RESIDUALS.values():
        made = residual_stack([Low() for _ in range(4)], WIDTH, residual)
        for block in made:
            block.register_forward_hook(lambda _, __, found: states.append(found[0]))
        assert made(torch.randn(BATCH, LENGTH, WIDTH)).dtype == torch.float32
    assert {state.dtype for state in states} == {torch.float32}


@pytest.mark.parametrize("answer", [lambda h: h[:, :1], lambda h: h[..., :1], lambda h: (h, h)], ids=["T", "D", "pair"])
def test_a_branch_must_return_the_shape_it_got(answer: Any):
    class Odd(nn.Module):
        def forward(self, h: Tensor) -> Any:
            return answer(h)

    made = residual_stack([Odd(), Odd()], WIDTH, "dar-full")
    with pytest.raises(ValueError, match=r"a branch returned .* for an input of \(3, 5, 11\)"):
        made(torch.randn(BATCH, LENGTH, WIDTH))


def test_a_single_branch():
    """A block size that nobody asked for does not stand in its way; DAR still says why it cannot work."""
    assert len(residual_stack([Turn()], WIDTH, "standard").blocks) == 1
    assert len(residual_stack([Turn()], WIDTH, "attnres-block").blocks) == 1
    with pytest.raises(ConfigError, match="collinear"):
        residual_stack([Turn()], WIDTH, "dar-full")


def by_branch(made: ResidualStack) -> list[list[nn.Module]]:
    """Each branch with the gates that belong to it, if any."""
    rows = []
    for block in made:
        for i, branch in enumerate(block.branches):
            gates = [gates[i] for gates in block.pathway.children() if isinstance(gates, nn.ModuleList)]
            rows.append([branch, *gates])
    return rows


@pytest.mark.parametrize("name", ["standard", "mhc-2"])
def test_block_size_means_nothing_without_history(name: str):
    """It only says what is sharded or recomputed together, and where mHC rounds its streams."""
    first = stack(dataclasses.replace(RESIDUALS[name], branches_per_block=2)).double()
    embedding = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    for branches_per_block in (1, 3, 4, 10):
        other = stack(dataclasses.replace(RESIDUALS[name], branches_per_block=branches_per_block)).double()
        for into, of in zip(by_branch(other), by_branch(first), strict=True):
            for a, b in zip(into, of, strict=True):
                a.load_state_dict(b.state_dict())
        assert relative_error(other(embedding), first(embedding)) < 1e-12

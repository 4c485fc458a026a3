"""Taps observe a pathway or replace its live streams; the model itself does not change.

with watching(decoder.stack, watcher):                   # outputs stay bit-identical
    decoder(tokens)
with replacing(block, i, lambda streams: 0 * streams):   # an intervention right after branch i writes
    decoder(tokens)

Taps nest, the last one outermost: a watcher added after an intervention sees the changed streams. They are not part of
the model: parameter names and `state_dict` are unchanged; copies and pickles made inside the context contain no taps.
"""
# B batch  T tokens  D width  J streams  N tokens of a batch

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from dualres.model.block import ResidualBlock, ResidualStack
from dualres.model.moe import MoE
from dualres.ops import Norm
from dualres.residual.pathway import History, Pathway

Change = Callable[[Tensor], Tensor]  # live streams (J,B,T,D) -> their replacement, same shape
COMPILED = (
    "a tap cannot see inside compiled code: analyze the model without torch.compile, or run compiled blocks eagerly "
    "inside `with eager(stack): …`"
)


class Site(NamedTuple):
    """Position of a branch, counted from 0."""

    block: int
    i: int  # within the block
    branch: int  # within the network

    @property
    def layer(self) -> int:
        """Two branches make a layer: attention, then MLP."""
        return self.branch // 2

    @property
    def ends_layer(self) -> bool:
        return self.branch % 2 == 1


class Watcher:
    """Callbacks during a forward pass; a subclass overrides the ones it needs and must not modify anything.

    Watchers look at states through the pathway's inspection methods: `streams`, `write_weights`, `depth_weights`.
    """

    def arrays(self) -> dict[str, Tensor]:
        """The results by their names in `analysis.ARRAYS`; arrays that do not apply to the model are absent."""
        return {}

    def on_block_start(self, block: int, history: History) -> None:
        """A block starts from the states H_0 … (J,B,T,D) of its history."""

    def on_read(self, site: Site, pathway: Pathway, before: Any, after: Any) -> None:
        """A branch has read state `before`; state `after` holds the gates of its write."""

    def on_write(self, site: Site, pathway: Pathway, state: Any) -> None:
        """A branch has written to the live streams."""

    def on_block_end(self, block: int, state: Tensor) -> None:
        """H_b (J,B,T,D) is complete."""

    def on_readout(self, readout: Any, history: History) -> None:
        """The readout is about to turn the history into the output."""

    def on_route(self, moe: MoE, arguments: tuple[Any, ...]) -> None:
        """A mixture of experts is about to run on these arguments."""


class TokenMeans:
    """Means over tokens that arrive in batches, one per key (a layer, a branch, …)."""

    def __init__(self) -> None:
        self.totals: dict[int, Tensor] = {}
        self.tokens: dict[int, int] = {}

    def add(self, key: int, values: Tensor) -> None:
        """One value per token. (…,N)"""
        values = values.detach().double()
        self.totals[key] = self.totals.get(key, values.new_zeros(())) + values.sum(-1)
        self.tokens[key] = self.tokens.get(key, 0) + values.shape[-1]

    def __bool__(self) -> bool:
        return bool(self.totals)

    def __getitem__(self, key: int) -> Tensor:
        return self.totals[key] / self.tokens[key]

    def keys(self) -> list[int]:
        return sorted(self.totals)

    def stacked(self) -> Tensor:
        """All means in the order of their keys. (keys,…)"""
        return torch.stack([self[key] for key in self.keys()])


class Tap:
    """Wraps a pathway and delegates to it except where a subclass overrides."""

    def __init__(self, pathway: Any):
        self.pathway = pathway  # or another tap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pathway, name)

    def open(self, history: History) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED)
        return self.pathway.open(history)


class Watched(Tap):
    """Reports every read and write of a block to the watchers."""

    def __init__(self, pathway: Any, watchers: Sequence[Watcher], block: int, first: int):
        super().__init__(pathway)
        self.watchers, self.block, self.first = watchers, block, first

    def open(self, history: History) -> Any:
        state = super().open(history)
        for watcher in self.watchers:
            watcher.on_block_start(self.block, history)
        return state

    def read(self, state: Any, i: int, norm: Norm | None = None) -> tuple[Tensor, Any]:
        h, after = self.pathway.read(state, i, norm)
        for watcher in self.watchers:
            watcher.on_read(self._site(i), self.pathway, state, after)
        return h, after

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        state = self.pathway.write(state, i, update)
        for watcher in self.watchers:
            watcher.on_write(self._site(i), self.pathway, state)
        return state

    def close(self, state: Any) -> Tensor:
        output = self.pathway.close(state)
        for watcher in self.watchers:
            watcher.on_block_end(self.block, output)
        return output

    def _site(self, i: int) -> Site:
        return Site(self.block, i, self.first + i)


class Replaced(Tap):
    """Changes the live streams right after one branch writes."""

    def __init__(self, pathway: Any, at: int, change: Change):
        super().__init__(pathway)
        self.at, self.change = at, change

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        state = self.pathway.write(state, i, update)
        if i != self.at:
            return state
        streams = self.pathway.streams(state)
        assert streams is not None  # a branch has written
        changed = self.change(streams)
        if changed.shape != streams.shape:
            raise ValueError(
                f"the change returned shape {tuple(changed.shape)} for streams of shape {tuple(streams.shape)}: it "
                "must return the same shape"
            )
        return self.pathway.with_streams(state, changed)


class Hook:
    """A forward pre-hook that calls several callbacks; in a copy of the module it calls none."""

    def __init__(self, *callbacks: Callable[[Any, Any], None]):
        self.callbacks = callbacks

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        for callback in self.callbacks:
            callback(module, arguments)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


@contextmanager
def watching(stack: ResidualStack, *watchers: Watcher) -> Iterator[None]:
    """Report every forward pass of the stack to the watchers; its outputs stay bit-identical."""
    blocks, taps = list(stack), [block.tap for block in stack]
    _reject_compiled(blocks)
    on_route = Hook(*(watcher.on_route for watcher in watchers))
    hooks = [module.register_forward_pre_hook(on_route) for module in stack.modules() if isinstance(module, MoE)]
    hooks.append(stack.readout.register_forward_pre_hook(Hook(*(watcher.on_readout for watcher in watchers))))
    first = 0
    try:
        for number, block in enumerate(blocks):
            block.tap = Watched(block.tap or block.pathway, watchers, number, first)
            first += len(block.branches)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for block, tap in zip(blocks, taps, strict=True):
            block.tap = tap


@contextmanager
def replacing(block: ResidualBlock, i: int, change: Change) -> Iterator[None]:
    """Replace the live streams with `change(streams)` right after branch i of the block writes."""
    _reject_compiled([block])
    if not 0 <= i < len(block.branches):
        raise ValueError(f"the block has no branch {i}: use 0 to {len(block.branches) - 1}")
    tap = block.tap
    block.tap = Replaced(tap or block.pathway, i, change)
    try:
        yield
    finally:
        block.tap = tap


@contextmanager
def eager(stack: ResidualStack) -> Iterator[None]:
    """Run blocks that `compile_blocks` compiled eagerly, so that taps can see inside."""
    compiled = {block: block.compiled_run for block in stack}
    try:
        for block in compiled:
            block.compiled_run = None
        yield
    finally:
        for block, run in compiled.items():
            block.compiled_run = run


def stream_count(stack: ResidualStack) -> int:
    """Number of streams of the method, which may store more tensors than that."""
    return cast(Any, stack.readout).stream_count(stack.streams)


def _reject_compiled(blocks: Sequence[ResidualBlock]) -> None:
    if any(block.compiled_run is not None for block in blocks):
        raise ValueError(COMPILED)

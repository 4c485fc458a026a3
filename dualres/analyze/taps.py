"""Taps: pathways that are watched, or whose live streams are replaced, while the model knows nothing of it.

with watching(decoder.stack, watcher):                   # the outputs stay what they are, bit for bit
    decoder(tokens)
with replacing(block, i, lambda streams: 0 * streams):   # an intervention, right after the write of branch i
    decoder(tokens)

Taps may stand around each other, the one that was put on last outermost: a watcher put on after an intervention sees
what it made of the streams. They are no part of the model: names and `state_dict` stay, and a copy or a pickle that is
made meanwhile has none.
"""
# B batch  T tokens  D width  J streams

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dualres.model.block import ResidualBlock, ResidualStack
from dualres.ops import Norm
from dualres.residual.pathway import History, Pathway
from dualres.residual.retrieval import Retrieval

Change = Callable[[Tensor], Tensor]  # live streams (J,B,T,D) -> others


class Site(NamedTuple):
    """A branch, counted from 0."""

    block: int
    i: int  # within the block
    branch: int  # within the network

    @property
    def layer(self) -> int:
        """Two branches are a layer: attention, then MLP."""
        return self.branch // 2

    @property
    def ends_layer(self) -> bool:
        """Whether it is the MLP."""
        return self.branch % 2 == 1


class Watcher:
    """What a forward pass is told of. A subclass takes what it wants; it looks, and changes nothing.

    Streams are seen through the pathway's lenses: `pathway.streams(state)`, `pathway.write_weights(state)`.
    """

    def opened(self, block: int, history: History) -> None:
        """A block has begun, on R states (J,B,T,D)."""

    def read(self, site: Site, pathway: Pathway, history: History, before: Any, after: Any) -> None:
        """A branch has read the state `before`; the gates of its write are in the state `after`."""

    def written(self, site: Site, pathway: Pathway, state: Any) -> None:
        """A branch's output is in the live streams."""

    def closed(self, block: int, state: Tensor) -> None:
        """H_b (J,B,T,D) is complete."""

    def reads_out(self, readout: nn.Module, history: History) -> None:
        """The output is about to be made of the history."""


class Tap:
    """A pathway around another, which does all the work."""

    def __init__(self, pathway: "Pathway | Tap"):
        self.pathway = pathway

    def open(self, history: History) -> Any:
        """As the pathway does."""
        if torch.compiler.is_compiling():
            raise RuntimeError(COMPILED)
        return self.pathway.open(history)

    def read(self, state: Any, i: int, norm: Norm | None = None) -> tuple[Tensor, Any]:
        """As the pathway does."""
        return self.pathway.read(state, i, norm)

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        """As the pathway does."""
        return self.pathway.write(state, i, update)

    def close(self, state: Any) -> Tensor:
        """As the pathway does."""
        return self.pathway.close(state)

    def streams(self, state: Any) -> Tensor | None:
        """The pathway's lens."""
        return self.pathway.streams(state)

    def with_streams(self, state: Any, live: Tensor) -> Any:
        """The pathway's lens."""
        return self.pathway.with_streams(state, live)

    def within(self, state: Any) -> tuple[Pathway, Any]:
        """The pathway that does the work, under all taps, and its own state."""
        return self.pathway.within(state) if isinstance(self.pathway, Tap) else (self.pathway, state)


class Seen(NamedTuple):
    """The pathway's own state, and what the block began with."""

    inner: Any
    history: History


class Watched(Tap):
    """Tells watchers of everything that happens."""

    def __init__(self, pathway: Pathway | Tap, watchers: Sequence[Watcher], block: int, first: int):
        super().__init__(pathway)
        self.watchers, self.block, self.first = watchers, block, first

    def open(self, history: History) -> Seen:
        """Then tell."""
        state = Seen(super().open(history), history)
        for watcher in self.watchers:
            watcher.opened(self.block, history)
        return state

    def read(self, state: Seen, i: int, norm: Norm | None = None) -> tuple[Tensor, Seen]:
        """Then tell."""
        h, inner = self.pathway.read(state.inner, i, norm)
        after = state._replace(inner=inner)
        (pathway, own), (_, left) = self.within(state), self.within(after)
        for watcher in self.watchers:
            watcher.read(self._site(i), pathway, state.history, own, left)
        return h, after

    def write(self, state: Seen, i: int, update: Tensor) -> Seen:
        """Then tell."""
        after = state._replace(inner=self.pathway.write(state.inner, i, update))
        pathway, own = self.within(after)
        for watcher in self.watchers:
            watcher.written(self._site(i), pathway, own)
        return after

    def close(self, state: Seen) -> Tensor:
        """Then tell."""
        closed = self.pathway.close(state.inner)
        for watcher in self.watchers:
            watcher.closed(self.block, closed)
        return closed

    def streams(self, state: Seen) -> Tensor | None:
        """The pathway's lens."""
        return self.pathway.streams(state.inner)

    def with_streams(self, state: Seen, live: Tensor) -> Seen:
        """The pathway's lens."""
        return state._replace(inner=self.pathway.with_streams(state.inner, live))

    def within(self, state: Seen) -> tuple[Pathway, Any]:
        """The pathway that does the work, under all taps, and its own state."""
        return super().within(state.inner)

    def _site(self, i: int) -> Site:
        return Site(self.block, i, self.first + i)


class Replaced(Tap):
    """Changes the live streams right after the write of one branch."""

    def __init__(self, pathway: Pathway | Tap, at: int, change: Change):
        super().__init__(pathway)
        self.at, self.change = at, change

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        """The pathway's, then the change."""
        state = self.pathway.write(state, i, update)
        if i != self.at:
            return state
        streams = self.pathway.streams(state)
        assert streams is not None  # something was written
        changed = self.change(streams)
        if changed.shape != streams.shape:
            raise ValueError(
                f"the change returned {tuple(changed.shape)} for streams of {tuple(streams.shape)}: it must return the "
                "same shape"
            )
        return self.pathway.with_streams(state, changed)


class Hook:
    """A forward pre-hook that tells others; in a copy of the module it tells no one."""

    def __init__(self, *told: Callable[[Any, Any], None]):
        self.told = told

    def __call__(self, module: nn.Module, given: Any) -> None:
        """The module is about to run."""
        for tell in self.told:
            tell(module, given)

    def __reduce__(self) -> tuple[type["Hook"], tuple[()]]:
        return Hook, ()


@contextmanager
def watching(stack: ResidualStack, *watchers: Watcher) -> Iterator[None]:
    """Tell the watchers of every forward pass of the stack; no bit of it changes."""
    blocks, taps = list(stack), [block.tap for block in stack]
    _refuse_compiled(blocks)
    hook = stack.readout.register_forward_pre_hook(Hook(*(watcher.reads_out for watcher in watchers)))
    first = 0
    try:
        for number, block in enumerate(blocks):
            block.tap = Watched(block.tap or block.pathway, watchers, number, first)
            first += len(block.branches)
        yield
    finally:
        hook.remove()
        for block, tap in zip(blocks, taps, strict=True):
            block.tap = tap


@contextmanager
def replacing(block: ResidualBlock, i: int, change: Change) -> Iterator[None]:
    """Put `change(streams)` in the place of the live streams, right after branch i of the block has written."""
    _refuse_compiled([block])
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
    """Run blocks that `compile_blocks` compiled without their compiled code, which no tap can look into."""
    compiled = {block: block.compiled_run for block in stack}
    try:
        for block in compiled:
            block.compiled_run = None
        yield
    finally:
        for block, run in compiled.items():
            block.compiled_run = run


def stream_count(stack: ResidualStack) -> int:
    """How many streams the method has. AttnRes + VProj has one, which it stores twice, as key and as value."""
    readout = stack.readout
    return len(readout.route.value) if isinstance(readout, Retrieval) else stack.streams


COMPILED = (
    "a tap cannot look into compiled code: analyse the model without torch.compile, or run compiled blocks by their "
    "plain code meanwhile, `with eager(stack): …`"
)


def _refuse_compiled(blocks: Sequence[ResidualBlock]) -> None:
    if any(block.compiled_run is not None for block in blocks):
        raise ValueError(COMPILED)

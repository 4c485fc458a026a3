"""What `step.py` measures: our methods, Llama of `transformers`, and residuals that a user would pick instead of ours.

`mhc-4-package` is mHC-4 by the package hyper-connections, and `attnres-block-plain` is AttnRes-Block as pseudocode
states it. Both have our decoder's branches, plain PyTorch in between, and autograd's backward pass.
"""
# B batch  T tokens  D width  R history  S streams of the package

import contextlib
import importlib
from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from dualres.config.schema import Config
from dualres.hub.llama import tensor_names, their_config, their_tensors
from dualres.model.decoder import build_decoder
from dualres.model.generation import generate
from dualres.ops import Norm
from dualres.plan.activations import LiveBytes
from dualres.residual.pathway import History, LastState, Pathway, Place
from dualres.residual.registration import register_method
from dualres.residual.registry import Method
from dualres.residual.retrieval import RetrievalOptions
from dualres.train.engines.base import MicroBatch, TorchEngine
from dualres.train.engines.build import build_engine
from dualres.train.optimizer import adamw
from dualres.train.process_group import World

ALTERNATIVES = ("llama", "attnres-block-plain", "mhc-4-package")
INSTALL = {
    "transformers": "pip install transformers",
    "hyper_connections": "pip install --no-deps hyper-connections einops",  # its other dependencies are not used here
}
PACKAGES = {"llama": "transformers", "mhc-4-package": "hyper_connections"}
STREAMS = 4  # of `mhc-4-package`


class Memory(NamedTuple):
    """Bytes of a step besides parameters, gradients and moments."""

    peak: int
    kept: int  # at the end of the forward pass


class Contender(ABC):
    """A model with its optimizer, and a batch of random tokens."""

    def __init__(self, config: Config, world: World):
        self.config, self.world = config, world
        self.sequences = self.random_tokens(config.train.micro_batch, config.model.context + 1)

    @abstractmethod
    def loss(self) -> Tensor:
        """The loss of the batch, with its graph."""

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Under Llama's names where Llama has them."""

    @abstractmethod
    def step(self) -> None:
        """Forward, backward, clip, update."""

    @abstractmethod
    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        """Continue prompts greedily, token by token, with a cache. (B,T) -> (B,new tokens)"""

    def share_weights(self, other: "Contender") -> None:
        """Use another contender's memory for equal weights: where they lie changes how long a matrix product takes."""
        others = other.parameters()
        for name, parameter in self.parameters().items():
            if name in others and others[name].shape == parameter.shape:
                parameter.data = others[name].data

    def random_tokens(self, batch: int, length: int) -> Tensor:
        """The same for every contender. -> (B,T)"""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.config.model.vocab_size, (batch, length), generator=generator).to(self.world.device)

    def finish(self) -> None:
        """Wait for the device."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()

    def memory(self) -> Memory:
        """Count the tensors of one step."""
        parameters = self.parameters().values()
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        older = [tensor for parameter in parameters for tensor in (parameter, parameter.grad)]
        with LiveBytes([tensor for tensor in older if tensor is not None]) as live:
            loss = self.loss()
            kept = live.now
            loss.backward()
        for parameter in parameters:
            parameter.grad = None
        return Memory(live.peak, kept)


class Ours(Contender):
    """Our decoder in the training engine of a single process, and our `generate`."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        engine = build_engine(config, world, end_of_text=0)
        assert isinstance(engine, TorchEngine)
        self.engine = engine

    def loss(self) -> Tensor:
        return self.engine.wrapped(self.sequences)

    def parameters(self) -> dict[str, nn.Parameter]:
        decoder = self.engine.decoder
        names = tensor_names(decoder) if self.config.model.moe is None else {}
        return {names.get(name, name): parameter for name, parameter in decoder.named_parameters()}

    def step(self) -> None:
        self.engine.accumulate([MicroBatch(self.sequences, 1.0)])
        self.engine.update(self.config.train.learning_rate, self.config.train.clip)
        self.finish()

    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        return torch.tensor(generate(self.engine.decoder, prompts.tolist(), new_tokens))


class Llama(Contender):
    """`LlamaForCausalLM` with the weights of `standard`, always eager, in a plain loop with the same AdamW."""

    def __init__(self, config: Config, world: World):
        super().__init__(config, world)
        transformers = needed("transformers")
        kind, fields = their_config(config.model, "the shape")
        assert kind == "llama", kind
        decoder = build_decoder(config.model, config.residual, device=world.device, seed=config.train.seed)
        model_config = transformers.LlamaConfig(**fields, eos_token_id=None, bos_token_id=None, pad_token_id=None)
        with torch.device(world.device):
            self.model = transformers.AutoModelForCausalLM.from_config(model_config, attn_implementation="sdpa")
        missing, unexpected = self.model.load_state_dict(their_tensors(decoder), strict=False)
        assert not unexpected, unexpected
        assert set(missing) <= {"lm_head.weight"}, missing  # if tied
        self.optimizer = adamw(self.model, config.train)
        self.autocast: Any = contextlib.nullcontext()
        if config.train.precision == "bf16":
            self.autocast = torch.autocast(world.device.type, torch.bfloat16)

    def loss(self) -> Tensor:
        """The mean over all predicted tokens, as `transformers` computes it."""
        tokens, targets = self.sequences[:, :-1], self.sequences[:, 1:].contiguous()
        with self.autocast:
            return self.model(tokens, labels=targets, shift_labels=targets, use_cache=False).loss

    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def step(self) -> None:
        self.model.train()
        self.loss().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.finish()

    def generate(self, prompts: Tensor, new_tokens: int) -> Tensor:
        self.model.eval()
        mask = torch.ones_like(prompts)
        tokens = self.model.generate(prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        return tokens[:, prompts.shape[1] :].cpu()


def contender(name: str, config: Config, world: World) -> Contender:
    return (Llama if name == "llama" else Ours)(config, world)


def residual_of(name: str) -> str:
    """The residual of a contender's config; the first use of an alternative's name registers it."""
    if package := PACKAGES.get(name):
        needed(package)
    if name == "mhc-4-package":
        register_method(name, Method(1, PackageMHC, PackageReadout, branches_per_block=2))
    if name == "attnres-block-plain":
        row = Method(1, PlainAttnRes, PlainReadout, branches_per_block=None, options=RetrievalOptions)
        register_method(name, row)
    return "standard" if name == "llama" else name


def needed(package: str) -> Any:
    """Import a package that only a contender needs."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError:
        name = next(name for name, needs in PACKAGES.items() if needs == package)
        raise SystemExit(f"{name} needs a package: {INSTALL[package]}, or leave it out of --alternatives") from None


class PlainState(NamedTuple):
    """The states before the block, and the sum of the block's updates so far."""

    history: History
    live: Tensor | None


def retrieve(states: list[Tensor], query: Tensor, eps: float) -> Tensor:
    """AttnRes as pseudocode: all states stacked, normalized as keys, scored, weighted. R × (B,T,D), (D) -> (B,T,D)"""
    values = torch.stack(states)
    keys = rms_norm(values, values.shape[-1:], eps=eps)
    weights = torch.einsum("d,rbtd->rbt", query, keys).softmax(0)
    return torch.einsum("rbt,rbtd->btd", weights, values)


class PlainAttnRes(Pathway):
    """AttnRes with every candidate stacked at every read."""

    keeps_history = True

    def __init__(self, dim: int, place: Place, *, eps: float):
        super().__init__()
        self.set_of_branch, self.eps = place.set_of_branch, eps
        self.queries = nn.Parameter(torch.zeros(len(set(place.set_of_branch)), dim))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.zeros_(self.queries)

    def open(self, history: History) -> PlainState:
        return PlainState(history, None)

    def read(self, state: PlainState, i: int, norm: Norm | None = None) -> tuple[Tensor, PlainState]:
        states = [past[0] for past in state.history] + ([] if state.live is None else [state.live])
        return normed(retrieve(states, self.queries[self.set_of_branch[i]], self.eps), norm), state

    def write(self, state: PlainState, i: int, update: Tensor) -> PlainState:
        return state._replace(live=update if state.live is None else state.live + update)

    def close(self, state: PlainState) -> Tensor:
        assert state.live is not None
        return state.live.unsqueeze(0)


class PlainReadout(nn.Module):
    """The output reads as a branch does."""

    def __init__(self, dim: int, *, eps: float):
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.zeros(dim))

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        nn.init.zeros_(self.query)

    def forward(self, *history: Tensor) -> Tensor:
        return retrieve([state[0] for state in history], self.query, self.eps)


class PackageState(NamedTuple):
    """Streams as the package lays them out, and what adds a branch's output to them."""

    live: Tensor  # (B·S,T,D)
    add: Any = None


class PackageMHC(Pathway):
    """A layer by `hyper_connections.mHC` with the package's defaults; states are (1,B·S,T,D)."""

    def __init__(self, dim: int, place: Place, *, eps: float):
        super().__init__()
        package = needed("hyper_connections")
        expand, _ = package.mHC.get_expand_reduce_stream_functions(STREAMS)
        self.expand = expand if place.history == 1 else nn.Identity()
        branches = range(2 * place.history - 2, 2 * place.history - 2 + place.branches)
        self.make = [partial(package.mHC, STREAMS, dim=dim, layer_index=branch) for branch in branches]
        self.connections = nn.ModuleList(make() for make in self.make)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """As the package initializes them: the decoder is built without values first."""
        with torch.device("cpu"):
            for connection, make in zip(self.connections, self.make, strict=True):
                connection.load_state_dict(make().state_dict())

    def open(self, history: History) -> PackageState:
        return PackageState(self.expand(history[-1][0]))

    def read(self, state: PackageState, i: int, norm: Norm | None = None) -> tuple[Tensor, PackageState]:
        h, add = self.connections[i](state.live)
        return normed(h, norm), PackageState(state.live, add)

    def write(self, state: PackageState, i: int, update: Tensor) -> PackageState:
        return PackageState(state.add(update))

    def close(self, state: PackageState) -> Tensor:
        return state.live.unsqueeze(0)


class PackageReadout(LastState):
    """The package's sum of its streams."""

    def __init__(self, dim: int, *, eps: float):
        super().__init__(dim, eps=eps)
        _, self.reduce = needed("hyper_connections").mHC.get_expand_reduce_stream_functions(STREAMS)

    def forward(self, *history: Tensor) -> Tensor:
        return self.reduce(history[-1][0])


def normed(h: Tensor, norm: Norm | None) -> Tensor:
    """PyTorch's own RMSNorm. (B,T,D)"""
    return h if norm is None else rms_norm(h, h.shape[-1:], norm.weight, norm.eps)

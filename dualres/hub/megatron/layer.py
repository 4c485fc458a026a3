"""A Megatron layer on a residual pathway: Megatron's branches, our reads and writes around them."""
# T tokens  B batch  D width  J streams; Megatron lays hidden states out as (T,B,D), and pathways act on each token

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from dualres.model.block import extended, fitting
from dualres.model.decoder import reset_part
from dualres.residual.pathway import History, Pathway, embed
from dualres.train.recipe import optimizer_groups

UNDECAYED = "residual_without_decay"  # the mark of parameters that are no matrices, whatever their shape


class Step(NamedTuple):
    """Where a branch stands: branch `branch` of block `block`, the last of it or not."""

    block: int
    branch: int
    last: bool


class Carried(NamedTuple):
    """What a layer hands to the next: the block states so far, and the open block with its state."""

    history: History
    pathway: Any  # None before the first block
    state: Any


class ResidualLayer(TransformerLayer):  # type: ignore[misc]
    """A `TransformerLayer` whose two branches read and write residual streams instead of adding to one.

    A block's parameters live in the layer that opens it, those of the readout in the last layer. What layers hand on
    travels as `context`, which Megatron has for cross-attention and takes from layer to layer as it is: so the history
    is never copied. The hidden states that a layer returns are those of its last branch, and nobody reads them; the
    last layer returns the readout, which goes on to the final norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        *,
        steps: Sequence[Step],
        streams: int,
        pathways: Mapping[int, Pathway],
        readout: nn.Module | None,
        seed: int,
        **options: Any,
    ):
        super().__init__(config, submodules, **options)
        self.steps, self.streams = steps, streams
        self.pathways = nn.ModuleDict({str(b): _started(p, f"pathway {b}", seed, config) for b, p in pathways.items()})
        self.readout = None if readout is None else _started(readout, "readout", seed, config)

    def forward(self, hidden_states: Tensor, context: Carried | None = None, **options: Any) -> tuple[Tensor, Any]:
        """(T,B,D) -> (T,B,D), and what the next layer is handed; `options` go to Megatron's branches as they are."""
        if (context is None) != (self.layer_number == 1):
            raise ValueError(
                f"layer {self.layer_number} was {'not ' if context is None else ''}handed the state of another: "
                "a pathway runs through all layers of a GPTModel, from the first, in one pipeline stage"
            )
        options.pop("dynamic_inference_decode_only", None)  # for Megatron's CUDA graphs, as in its own layer
        history, pathway, state = context or Carried(embed(hidden_states, self.streams), None, None)
        for step, branch in zip(self.steps, (self.attention, self.feedforward), strict=True):
            if step.branch == 0:
                pathway = cast(Pathway, self.pathways[str(step.block)])
                before_forward(pathway)
                state = pathway.open(history)
            h, state = pathway.read(state, step.branch)
            hidden_states = branch(h, options)
            state = pathway.write(state, step.branch, fitting(hidden_states, h))
            if step.last:
                history = extended(history, pathway.close(state), pathway)
        if self.readout is None:
            return hidden_states, Carried(history, pathway, state)
        return self.readout(*history), None

    def attention(self, h: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Norm and attention by Megatron's own code, which adds no residual: the spec took `bias_dropout_add` away."""
        update, _ = self._forward_attention(h, **options)
        return update

    def feedforward(self, h: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Norm and feed-forward or experts, likewise. (T,B,D) -> (T,B,D)"""
        return self._forward_mlp(h, options.get("inference_context"), padding_mask=options.get("padding_mask"))


def output_alone(training: bool, fused: bool) -> Any:
    """In the place of Megatron's `get_bias_dropout_add`: bias and dropout, and no residual."""

    def update(output: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
        mixed, bias = output
        mixed = mixed if bias is None else mixed + bias
        return nn.functional.dropout(mixed, probability, training) if probability else mixed

    return update


def before_forward(part: nn.Module) -> None:
    """Call the hooks that wait for a module's `forward`: a pathway is used through other methods.

    Megatron's data parallelism waits in them until gathered parameters have arrived (`overlap_param_gather`).
    """
    for module in part.modules():
        for number, hook in module._forward_pre_hooks.items():
            options: tuple[Any, ...] = ({},) if number in module._forward_pre_hooks_with_kwargs else ()
            hook(module, (), *options)


def _started(part: nn.Module, name: str, seed: int, config: TransformerConfig) -> Any:
    """A part of its own with the weights of `Decoder(…, seed)`: the same on every rank, whatever was drawn before.

    Under sequence parallelism a rank sees a part of the tokens only: Megatron sums the gradients of parameters that
    are marked `sequence_parallel` over the ranks. Queries and gates are marked for `decay_overrides`.
    """
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    made = copy.deepcopy(part).to_empty(device=device).to(config.params_dtype)
    reset_part(made, name, config.init_method_std, seed)
    for group in optimizer_groups(made, weight_decay=1.0):
        for parameter in group["params"]:
            parameter.sequence_parallel = config.sequence_parallel
            setattr(parameter, UNDECAYED, not group["weight_decay"])
    return made

"""A Megatron layer with a residual pathway: Megatron's branches between our reads and writes."""
# T tokens  B batch  D width  J streams; Megatron's hidden states are (T,B,D), and pathways act on each token

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from dualres import ops
from dualres.model.block import checked_update, embed, extended
from dualres.model.decoder import reset_part
from dualres.residual.pathway import History, Pathway
from dualres.train.optimizer import optimizer_groups

UNDECAYED = "residual_without_decay"  # attribute of parameters without weight decay, of any shape


class Step(NamedTuple):
    """The position of a branch: `branch` of `block`, and whether it is the block's last."""

    block: int
    branch: int
    last: bool


class Residuals(NamedTuple):
    """The state passed from layer to layer: the block states so far, and the open block with its state."""

    history: History
    pathway: Any  # None before the first block
    state: Any


class ResidualLayer(TransformerLayer):  # type: ignore[misc]
    """A `TransformerLayer` with two branches that read and write residual streams instead of adding to one.

    A block's parameters are in the layer that opens it, the readout's in the last layer. The residual state is passed
    as `context`, which Megatron uses for cross-attention and passes from layer to layer unchanged, so the history is
    never copied. A layer returns the output of its last branch, which is not used; the last layer returns the readout,
    which goes to the final norm.
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
        self.pathways = nn.ModuleDict({str(b): _copy(p, f"pathway {b}", seed, config) for b, p in pathways.items()})
        self.readout = None if readout is None else _copy(readout, "readout", seed, config)

    def forward(self, hidden_states: Tensor, context: Residuals | None = None, **options: Any) -> tuple[Tensor, Any]:
        """(T,B,D) -> (T,B,D) and the next layer's `context`; `options` are passed to Megatron's branches unchanged."""
        if (context is None) != (self.layer_number == 1):
            raise ValueError(
                f"layer {self.layer_number} has {'no' if context is None else 'a'} context: a residual pathway needs "
                "all layers of the GPTModel, in order, in one pipeline stage"
            )
        options.pop("dynamic_inference_decode_only", None)  # for Megatron's CUDA graphs, as in its own layer
        history, pathway, state = context or Residuals(embed(hidden_states, self.streams), None, None)
        for step, branch in zip(self.steps, (self.attention, self.feedforward), strict=True):
            if step.branch == 0:
                pathway = cast(Pathway, self.pathways[str(step.block)])
                call_forward_pre_hooks(pathway)
                state = pathway.open(history)
            h, state = pathway.read(state, step.branch)
            hidden_states = branch(h, options)
            state = pathway.write(state, step.branch, checked_update(hidden_states, h))
            if step.last:
                history = extended(ops.passed_on(history, pathway.carriers(state)), pathway.close(state), pathway)
        if self.readout is None:
            return hidden_states, Residuals(history, pathway, state)
        return self.readout(*history), None

    def attention(self, h: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Megatron's norm and attention without a residual: the spec replaces `bias_dropout_add`. (T,B,D) -> (T,B,D)"""
        update, _ = self._forward_attention(h, **options)
        return update

    def feedforward(self, h: Tensor, options: Mapping[str, Any]) -> Tensor:
        """Megatron's norm and feed-forward or experts without a residual. (T,B,D) -> (T,B,D)"""
        return self._forward_mlp(h, options.get("inference_context"), padding_mask=options.get("padding_mask"))


def bias_dropout(training: bool, fused: bool) -> Any:
    """Replaces Megatron's `get_bias_dropout_add`: bias and dropout, without adding a residual."""

    def update(output: tuple[Tensor, Tensor | None], residual: Tensor, probability: float) -> Tensor:
        value, bias = output
        value = value if bias is None else value + bias
        return nn.functional.dropout(value, probability, training) if probability else value

    return update


def call_forward_pre_hooks(part: nn.Module) -> None:
    """Call the forward pre-hooks of a pathway, whose `forward` is never called.

    Megatron's data parallelism waits there for gathered parameters (`overlap_param_gather`).
    """
    for module in part.modules():
        for number, hook in module._forward_pre_hooks.items():
            options: tuple[Any, ...] = ({},) if number in module._forward_pre_hooks_with_kwargs else ()
            hook(module, (), *options)


def _copy(part: nn.Module, name: str, seed: int, config: TransformerConfig) -> Any:
    """Copy a part and initialize it as in `Decoder(…, seed)`, equally on every rank.

    With sequence parallelism a rank sees only some of the tokens: Megatron sums the gradients of parameters marked
    `sequence_parallel` over the ranks. Queries and gates are marked for `decay_overrides`.
    """
    device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
    part = copy.deepcopy(part).to_empty(device=device).to(config.params_dtype)
    reset_part(part, name, config.init_method_std, seed)
    for group in optimizer_groups(part, weight_decay=1.0):
        for parameter in group["params"]:
            parameter.sequence_parallel = config.sequence_parallel
            setattr(parameter, UNDECAYED, not group["weight_decay"])
    return part

"""Weights to and from a Megatron `GPTModel`: the decoder's tensors, fused and sharded over Megatron's ranks."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from dualres.hub.megatron.layer import ResidualLayer


class Form(NamedTuple):
    """How tensors of the decoder become one Megatron parameter, sharded over the ranks of a group, and back.

    The tensors are cut along `dim` into groups, and each group has its part of every tensor, in `shares`.
    """

    dim: int | None = 0  # None: every rank has the whole tensor
    shares: tuple[int, ...] = (1,)  # relative sizes of the tensors
    groups: int | None = None  # None: one for each rank

    def cut(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        """The parameter of one rank, of full tensors."""
        if self.dim is None:
            return tensors[0]
        if self.groups is None:
            return torch.cat([t.chunk(ranks, self.dim)[rank] for t in tensors], self.dim)
        by_group = torch.cat([t.unflatten(self.dim, (self.groups, -1)) for t in tensors], self.dim + 1)
        return by_group.chunk(ranks, self.dim)[rank].flatten(self.dim, self.dim + 1)

    def glue(self, parts: list[Tensor]) -> list[Tensor]:
        """The full tensors, of the parameters of all ranks."""
        if self.dim is None:
            return parts[:1]
        by_group = torch.cat(parts, self.dim).unflatten(self.dim, (self.groups or len(parts), sum(self.shares), -1))
        return [t.flatten(self.dim, self.dim + 2) for t in by_group.split(self.shares, self.dim + 1)]


WHOLE, ROWS, COLUMNS = Form(None), Form(0), Form(1)
GATED = Form(shares=(1, 1))  # each rank has its rows of gate, then those of up


class Spot(NamedTuple):
    """The decoder's tensors in a Megatron parameter."""

    form: Form
    ours: tuple[str, ...]
    expert: int | None = None  # local index in the decoder's one tensor of all experts


Table = dict[str, tuple[Any, ...]]
NORM = (WHOLE, "norm.weight")
FEEDFORWARD: Table = {  # Megatron's name in a layer: the form, and the decoder's names in a branch
    "pre_mlp_layernorm.weight": NORM,
    "mlp.linear_fc1.layer_norm_weight": NORM,  # TransformerEngine fuses it with the next linear layer
    "mlp.linear_fc1.weight": (GATED, "module.gate.weight", "module.up.weight"),
    "mlp.linear_fc2.weight": (COLUMNS, "module.down.weight"),
    "mlp.router.weight": (WHOLE, "module.router.weight"),
}
EXPERTS: Table = {  # one by one, in Megatron's module and in TransformerEngine's
    "mlp.experts.local_experts.{}.linear_fc1.weight": (GATED, "module.gate_up"),
    "mlp.experts.local_experts.{}.linear_fc2.weight": (COLUMNS, "module.down"),
    "mlp.experts.linear_fc1.weight{}": (GATED, "module.gate_up"),
    "mlp.experts.linear_fc2.weight{}": (COLUMNS, "module.down"),
}
VOCABULARY = ("vocabulary.table.weight", "vocabulary.output.weight")
OUTSIDE = {
    "embedding.word_embeddings.weight": Spot(ROWS, VOCABULARY[:1]),
    "output_layer.weight": Spot(ROWS, VOCABULARY[1:]),
    "decoder.final_layernorm.weight": Spot(WHOLE, ("norm.weight",)),
}


def attention(config: Any) -> Table:
    """Query, key and value are interleaved by query group: the group's queries, its key, its value."""
    groups = config.num_query_groups
    qkv = Form(shares=(config.num_attention_heads // groups, 1, 1), groups=groups)
    return {
        "input_layernorm.weight": NORM,
        "self_attention.linear_qkv.layer_norm_weight": NORM,
        "self_attention.linear_qkv.weight": (qkv, *(f"module.{name}.weight" for name in ("query", "key", "value"))),
        "self_attention.linear_qkv.bias": (qkv, *(f"module.{name}.bias" for name in ("query", "key", "value"))),
        "self_attention.linear_proj.weight": (COLUMNS, "module.output.weight"),
        "self_attention.q_layernorm.weight": (WHOLE, "module.query_norm.weight"),
        "self_attention.k_layernorm.weight": (WHOLE, "module.key_norm.weight"),
    }


@torch.no_grad()
def import_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a decoder's state dict into a `GPTModel`, wrapped or not; each rank takes its part.

    If the optimizer keeps its own copies of the weights, call `optimizer.reload_model_params()` afterwards.
    """
    (gpt,) = unwrap_model([model])
    found, groups = spots(gpt), gpt.pg_collection
    wanted = {name for spot in found.values() for name in spot.ours}
    if wanted != state.keys():
        odd = sorted(wanted ^ state.keys())
        where = "the state dict" if odd[0] in wanted else "the Megatron model"
        raise ValueError(f"{odd[0]} is missing in {where}, and {len(odd) - 1} more: build both from the same configs")
    size = len(state[VOCABULARY[0]])
    if size != gpt.vocab_size:
        raise ValueError(
            f"vocab_size is {gpt.vocab_size} in the Megatron model and {size} in the state dict: if Megatron's is "
            f"padded, import `with_vocabulary(state, {gpt.vocab_size})`"
        )
    for name, parameter in gpt.named_parameters():
        spot = found[name]
        tensors: Sequence[Tensor] = [state[n] for n in spot.ours]
        over = groups.tp
        if spot.expert is not None:
            experts, over = tensors[0], groups.expt_tp
            if len(experts) != gpt.config.num_moe_experts:
                numbers = f"{gpt.config.num_moe_experts} in the Megatron model and {len(experts)} in the state dict"
                raise ValueError(f"the experts of {name} are {numbers}: build both from the same configs")
            tensors = experts[_expert(spot, groups.ep.rank(), gpt)].chunk(len(spot.form.shares))
        part = spot.form.cut(tensors, over.rank(), over.size())
        if part.shape != parameter.shape:
            shapes = f"{tuple(parameter.shape)} in the Megatron model and {tuple(part.shape)} in the state dict"
            raise ValueError(f"{name} is {shapes}: build both from the same configs, with heads and widths that divide")
        parameter.copy_(part)


@torch.no_grad()
def export_weights(model: nn.Module, of: Callable[[nn.Parameter], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """The decoder's full state dict on the CPU of every rank; all ranks must call it.

    `of` selects what to export of a parameter, such as its gradient.
    """
    (gpt,) = unwrap_model([model])
    found, groups = spots(gpt), gpt.pg_collection
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, parameter in gpt.named_parameters():
        spot = found[name]
        tensors = spot.form.glue(_gathered(of(parameter), groups.tp if spot.expert is None else groups.expt_tp))
        if spot.expert is None:
            state |= {ours: _on_cpu(tensor) for ours, tensor in zip(spot.ours, tensors, strict=True)}
        else:
            for rank, tensor in enumerate(_gathered(torch.cat(tensors), groups.ep)):
                experts[spot.ours[0]][_expert(spot, rank, gpt)] = _on_cpu(tensor)
    return state | {name: torch.stack([own[e] for e in sorted(own)]) for name, own in experts.items()}


def with_vocabulary(state: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """The decoder's state dict with another vocabulary size: added tokens are zero, the last ones are dropped.

    Megatron pads its vocabulary to a multiple of 128 times the tensor-parallel ranks. A zero row has the logit 0, so it
    counts in Megatron's loss until training has made it improbable.
    """
    found = dict(state)
    for name in VOCABULARY:
        if name in found:
            table = found[name][:vocab_size]
            found[name] = torch.cat([table, table.new_zeros(vocab_size - len(table), table.shape[1])])
    return found


def spots(model: Any) -> dict[str, Spot]:
    """The decoder's tensors in every parameter of a `GPTModel`."""
    for name in ("pre_process", "post_process"):
        if not getattr(model, name):
            raise ValueError(f"{name}=False leaves out a part of the Megatron model: build it with True")
    known = dict(OUTSIDE)
    for number, layer in enumerate(model.decoder.layers):
        known |= {f"decoder.layers.{number}.{theirs}": spot for theirs, spot in _of_layer(layer)}
    names = [name for name, _ in model.named_parameters()]
    foreign = [name for name in names if name not in known]
    if foreign:
        raise ValueError(f"{foreign[0]} of the Megatron model has no counterpart in the decoder: leave that part out")
    return {name: known[name] for name in names}


def _of_layer(layer: ResidualLayer) -> Iterator[tuple[str, Spot]]:
    for step, table in zip(layer.steps, (attention(layer.config), FEEDFORWARD), strict=True):
        branch = f"stack.blocks.{step.block}.branches.{step.branch}."
        for theirs, (form, *ours) in table.items():
            yield theirs, Spot(form, tuple(branch + name for name in ours))
    for expert in range(getattr(layer.mlp, "num_local_experts", 0)):
        for theirs, (form, *ours) in EXPERTS.items():
            yield theirs.format(expert), Spot(form, tuple(branch + name for name in ours), expert)
    for name, _ in layer.pathways.named_parameters():
        block, _, inside = name.partition(".")
        yield f"pathways.{name}", Spot(WHOLE, (f"stack.blocks.{block}.pathway.{inside}",))
    for name, _ in layer.readout.named_parameters() if layer.readout is not None else ():
        yield f"readout.{name}", Spot(WHOLE, (f"stack.readout.{name}",))


def _expert(spot: Spot, rank: int, model: Any) -> int:
    """The index of a spot's expert among all, given its `rank` among the expert ranks."""
    return rank * (model.config.num_moe_experts // model.pg_collection.ep.size()) + spot.expert


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True).contiguous()


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts

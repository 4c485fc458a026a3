"""Import and export of weights: the decoder's tensors, fused and sharded over the ranks of a Megatron `GPTModel`."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from dualres.hub.megatron.layer import ResidualLayer


class ShardLayout(NamedTuple):
    """How a Megatron parameter is fused from tensors of the decoder and sharded over the ranks of a group.

    The tensors are split along `dim` into groups, and each group holds its part of every tensor, in `shares`.
    """

    dim: int | None = 0  # None: replicated on every rank
    shares: tuple[int, ...] = (1,)  # relative sizes of the tensors
    groups: int | None = None  # None: one per rank

    def shard(self, tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
        """Fuse full tensors and return the shard of one rank."""
        if self.dim is None:
            return tensors[0]
        if self.groups is None:
            return torch.cat([t.chunk(ranks, self.dim)[rank] for t in tensors], self.dim)
        by_group = torch.cat([t.unflatten(self.dim, (self.groups, -1)) for t in tensors], self.dim + 1)
        return by_group.chunk(ranks, self.dim)[rank].flatten(self.dim, self.dim + 1)

    def unshard(self, shards: list[Tensor]) -> list[Tensor]:
        """Reassemble the full tensors from the shards of all ranks."""
        if self.dim is None:
            return shards[:1]
        by_group = torch.cat(shards, self.dim).unflatten(self.dim, (self.groups or len(shards), sum(self.shares), -1))
        return [t.flatten(self.dim, self.dim + 2) for t in by_group.split(self.shares, self.dim + 1)]


REPLICATED, ROWS, COLUMNS = ShardLayout(None), ShardLayout(0), ShardLayout(1)
GATED = ShardLayout(shares=(1, 1))  # each rank has its rows of gate, then its rows of up


class ParameterMapping(NamedTuple):
    """The tensors of the decoder that make up a Megatron parameter."""

    layout: ShardLayout
    ours: tuple[str, ...]
    expert: int | None = None  # local index in the decoder's stacked tensor of all experts


Table = dict[str, tuple[Any, ...]]
NORM = (REPLICATED, "norm.weight")
FEEDFORWARD: Table = {  # Megatron's name in a layer -> layout, and the decoder's names in a branch
    "pre_mlp_layernorm.weight": NORM,
    "mlp.linear_fc1.layer_norm_weight": NORM,  # TransformerEngine fuses it with the next linear layer
    "mlp.linear_fc1.weight": (GATED, "module.gate.weight", "module.up.weight"),
    "mlp.linear_fc2.weight": (COLUMNS, "module.down.weight"),
    "mlp.router.weight": (REPLICATED, "module.router.weight"),
}
EXPERTS: Table = {  # one parameter per expert, in Megatron's module and in TransformerEngine's
    "mlp.experts.local_experts.{}.linear_fc1.weight": (GATED, "module.gate_up"),
    "mlp.experts.local_experts.{}.linear_fc2.weight": (COLUMNS, "module.down"),
    "mlp.experts.linear_fc1.weight{}": (GATED, "module.gate_up"),
    "mlp.experts.linear_fc2.weight{}": (COLUMNS, "module.down"),
}
VOCABULARY = ("vocabulary.table.weight", "vocabulary.output.weight")
OUTSIDE = {
    "embedding.word_embeddings.weight": ParameterMapping(ROWS, VOCABULARY[:1]),
    "output_layer.weight": ParameterMapping(ROWS, VOCABULARY[1:]),
    "decoder.final_layernorm.weight": ParameterMapping(REPLICATED, ("norm.weight",)),
}


def attention(config: Any) -> Table:
    """Attention parameters of a layer. QKV is interleaved by query group: the group's queries, its key, its value."""
    groups = config.num_query_groups
    qkv = ShardLayout(shares=(config.num_attention_heads // groups, 1, 1), groups=groups)
    return {
        "input_layernorm.weight": NORM,
        "self_attention.linear_qkv.layer_norm_weight": NORM,
        "self_attention.linear_qkv.weight": (qkv, *(f"module.{name}.weight" for name in ("query", "key", "value"))),
        "self_attention.linear_qkv.bias": (qkv, *(f"module.{name}.bias" for name in ("query", "key", "value"))),
        "self_attention.linear_proj.weight": (COLUMNS, "module.output.weight"),
        "self_attention.q_layernorm.weight": (REPLICATED, "module.query_norm.weight"),
        "self_attention.k_layernorm.weight": (REPLICATED, "module.key_norm.weight"),
    }


@torch.no_grad()
def import_weights(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a decoder's state dict into a `GPTModel`, wrapped or not; each rank copies its shards.

    If the optimizer keeps its own copies of the weights, call `optimizer.reload_model_params()` afterward.
    """
    (gpt,) = unwrap_model([model])
    mappings, groups = parameter_mappings(gpt), gpt.pg_collection
    expected = {name for mapping in mappings.values() for name in mapping.ours}
    if different := sorted(expected ^ state.keys()):
        where = "the state dict" if different[0] in expected else "the Megatron model"
        more = f" (and {len(different) - 1} more)" if different[1:] else ""
        raise ValueError(f"{different[0]} is missing from {where}{more}: build both from the same configs")
    size = len(state[VOCABULARY[0]])
    if size != gpt.vocab_size:
        raise ValueError(
            f"vocab_size is {gpt.vocab_size} in the Megatron model and {size} in the state dict: if Megatron's is "
            f"padded, import `with_vocabulary(state, {gpt.vocab_size})`"
        )
    for name, parameter in gpt.named_parameters():
        mapping = mappings[name]
        tensors: Sequence[Tensor] = [state[n] for n in mapping.ours]
        group = groups.tp
        if mapping.expert is not None:
            experts, group = tensors[0], groups.expt_tp
            if len(experts) != gpt.config.num_moe_experts:
                numbers = f"{gpt.config.num_moe_experts} in the Megatron model and {len(experts)} in the state dict"
                raise ValueError(f"the number of experts of {name} is {numbers}: build both from the same configs")
            tensors = experts[_expert_index(mapping, groups.ep.rank(), gpt)].chunk(len(mapping.layout.shares))
        shard = mapping.layout.shard(tensors, group.rank(), group.size())
        if shard.shape != parameter.shape:
            shapes = f"{tuple(parameter.shape)} in the Megatron model and {tuple(shard.shape)} in the state dict"
            raise ValueError(f"{name} is {shapes}: use the same configs, with sizes that tensor ranks divide")
        parameter.copy_(shard)


@torch.no_grad()
def export_weights(model: nn.Module, of: Callable[[nn.Parameter], Tensor] = Tensor.detach) -> dict[str, Tensor]:
    """Gather the decoder's full state dict on the CPU of every rank; all ranks must call it.

    `of` selects what to export for a parameter, such as its gradient.
    """
    (gpt,) = unwrap_model([model])
    mappings, groups = parameter_mappings(gpt), gpt.pg_collection
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = defaultdict(dict)
    for name, parameter in gpt.named_parameters():
        mapping = mappings[name]
        shards = _gathered(of(parameter), groups.tp if mapping.expert is None else groups.expt_tp)
        tensors = mapping.layout.unshard(shards)
        if mapping.expert is None:
            state |= {ours: _on_cpu(tensor) for ours, tensor in zip(mapping.ours, tensors, strict=True)}
        else:
            for rank, tensor in enumerate(_gathered(torch.cat(tensors), groups.ep)):
                experts[mapping.ours[0]][_expert_index(mapping, rank, gpt)] = _on_cpu(tensor)
    return state | {name: torch.stack([tensors[e] for e in sorted(tensors)]) for name, tensors in experts.items()}


def with_vocabulary(state: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Pad the vocabulary of a decoder's state dict with zero rows, or truncate it, to `vocab_size`.

    Megatron pads its vocabulary to a multiple of 128 times the tensor-parallel ranks. A zero row has the logit 0, so it
    counts in Megatron's loss until training has made it improbable.
    """
    resized = dict(state)
    for name in VOCABULARY:
        if name in resized:
            table = resized[name][:vocab_size]
            resized[name] = torch.cat([table, table.new_zeros(vocab_size - len(table), table.shape[1])])
    return resized


def parameter_mappings(model: Any) -> dict[str, ParameterMapping]:
    """The mapping of every parameter of a `GPTModel`, by name."""
    for name in ("pre_process", "post_process"):
        if not getattr(model, name):
            raise ValueError(f"{name}=False omits a part of the Megatron model: build it with {name}=True")
    known = dict(OUTSIDE)
    for number, layer in enumerate(model.decoder.layers):
        known |= {f"decoder.layers.{number}.{theirs}": mapping for theirs, mapping in _layer_mappings(layer)}
    names = [name for name, _ in model.named_parameters()]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]} of the Megatron model has no counterpart in the decoder: remove that part")
    return {name: known[name] for name in names}


def _layer_mappings(layer: ResidualLayer) -> Iterator[tuple[str, ParameterMapping]]:
    for step, table in zip(layer.steps, (attention(layer.config), FEEDFORWARD), strict=True):
        branch = f"stack.blocks.{step.block}.branches.{step.branch}."
        for theirs, (layout, *ours) in table.items():
            yield theirs, ParameterMapping(layout, tuple(branch + name for name in ours))
    for expert in range(getattr(layer.mlp, "num_local_experts", 0)):
        for theirs, (layout, *ours) in EXPERTS.items():
            yield theirs.format(expert), ParameterMapping(layout, tuple(branch + name for name in ours), expert)
    for name, _ in layer.pathways.named_parameters():
        block, _, inside = name.partition(".")
        yield f"pathways.{name}", ParameterMapping(REPLICATED, (f"stack.blocks.{block}.pathway.{inside}",))
    for name, _ in layer.readout.named_parameters() if layer.readout is not None else ():
        yield f"readout.{name}", ParameterMapping(REPLICATED, (f"stack.readout.{name}",))


def _expert_index(mapping: ParameterMapping, rank: int, model: Any) -> int:
    """The global index of an expert on an expert-parallel rank."""
    return rank * (model.config.num_moe_experts // model.pg_collection.ep.size()) + mapping.expert


def _on_cpu(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True).contiguous()


def _gathered(tensor: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    shards = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(shards, tensor.contiguous(), group=group)
    return shards

"""Megatron's model beside our decoder: the same weights, then logits and gradients compared."""
# B batch  T tokens  V vocabulary

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from dualres.config.schema import ModelConfig, MoEConfig, ResidualConfig
from dualres.hub.megatron import export_weights, gpt_options, import_weights, layer_spec, transformer_options
from dualres.model.attention import rotary_frequencies
from dualres.model.decoder import Decoder
from tests.hub.megatron.layouts import Layout
from tests.model.distributed_worker import ZERO, by_module
from tests.small import RESIDUALS, gradients, model_config, next_token_loss, random_tokens, relative_error, stirred

BATCH, LENGTH, VOCABULARY = 2, 14, 96  # two ranks halve them
EXACT, TOLERANCE = 1e-9, 1e-5  # relative root mean square; `exact` says which
LAYERS = 3  # with two layers per block, the last block is a shorter one
METHODS = {**RESIDUALS, "dar-halves": ResidualConfig("dar-block", branches_per_block=3)}  # a block ends inside a layer


def small(feedforward: str, layout: Layout, **changes: Any) -> ModelConfig:
    """The auxiliary loss is no mean over tokens: that of a batch is not the mean of its halves'."""
    coefficient = 0.01 if layout.replicas == 1 else 0.0
    if feedforward == "moe":
        changes["moe"] = MoEConfig(experts=6, active=2, expert_width=24, aux_coefficient=coefficient)
    return model_config(feedforward, layers=LAYERS, vocab_size=VOCABULARY, **changes)


def stirred_decoder(residual: str, model: ModelConfig, dtype: torch.dtype = torch.float64) -> Decoder:
    return stirred(model, METHODS[residual], noise=0.1).to(dtype)


def exact(decoder: Decoder) -> bool:
    """Whether all is computed in float64: Megatron weighs experts in float32 whatever the dtype."""
    return decoder.norm.weight.dtype == torch.float64 and decoder.config.moe is None


def gpt_models(count: int, decoder: Decoder, layout: Layout, seed: int = 42, **options: Any) -> list[Any]:
    """Megatron's models of one spec, with weights of their own."""
    model, dtype = decoder.config, decoder.norm.weight.dtype
    settings = {"use_cpu_initialization": True, "params_dtype": dtype, "sequence_parallel": layout.sequence}
    if dtype == torch.float64 and model.moe is not None:
        options["moe_router_dtype"] = "fp64"
    config = TransformerConfig(**{**transformer_options(model), **settings, **layout.sizes(), **options})
    spec = layer_spec(config, decoder.residual_config, seed=seed)
    made = [GPTModel(config, spec, **gpt_options(model)) for _ in range(count)]
    for gpt in made:  # Megatron's frequencies are float32, whatever the dtype
        gpt.rotary_pos_emb.inv_freq = rotary_frequencies(
            model.head_width, model.rope_base, model.rope_scaling, dtype, torch.device("cpu")
        )
    return made


def megatron(decoder: Decoder, layout: Layout, **options: Any) -> nn.Module:
    """Megatron's model with the decoder's weights, in Megatron's data parallelism."""
    (gpt,) = gpt_models(1, decoder, layout, **options)
    import_weights(gpt, decoder.state_dict())
    return DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt)


def their_logits(gpt: nn.Module, tokens: Tensor) -> Tensor:
    """Whole on every rank that shares tensors. (B,T) -> (B,T,V)"""
    positions = torch.arange(LENGTH).expand(len(tokens), -1)
    return gather_from_tensor_model_parallel_region(gpt(tokens, positions, future(LENGTH)))


def future(length: int) -> Tensor:
    """What a token does not see. -> (1,1,T,T)"""
    return torch.ones(length, length).triu(1).bool()[None, None]


def differences(decoder: Decoder, gpt: nn.Module, layout: Layout) -> dict[str, float]:
    """Relative errors of the logits and of every gradient."""
    tokens = random_tokens(BATCH, LENGTH, VOCABULARY)
    logits = decoder(tokens)
    next_token_loss(logits, tokens).backward()
    part = dist.get_rank() if layout.replicas > 1 else 0
    tokens, logits = tokens.chunk(layout.replicas)[part], logits.chunk(layout.replicas)[part]
    theirs = their_logits(gpt, tokens)
    next_token_loss(theirs, tokens).backward()
    finalize_model_grads([gpt])

    found = export_weights(gpt, lambda parameter: parameter.main_grad)  # type: ignore[attr-defined]
    wanted = gradients(decoder)
    assert found.keys() == wanted.keys()
    if not exact(decoder):
        found, wanted = by_module(found), by_module(wanted)
    errors = {"logits": relative_error(theirs, logits)}
    for name in wanted:
        zero = (found[name] - wanted[name]).square().mean().sqrt() < ZERO[theirs.dtype]
        errors[f"the gradient of {name}"] = 0.0 if zero else relative_error(found[name], wanted[name])
    return errors


def equal(decoder: Decoder, layout: Layout, **options: Any) -> list[str]:
    """Logits and gradients are ours, and the weights come back bit for bit."""
    gpt = megatron(decoder, layout, **options)
    lost = changed(decoder.state_dict(), export_weights(gpt))
    errors, most = differences(decoder, gpt, layout), EXACT if exact(decoder) else TOLERANCE
    return lost + [f"{name} is off by {error:.1e}" for name, error in errors.items() if not error < most]


def changed(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [f"{name} came back changed" for name in wanted if not torch.equal(found[name], wanted[name])]

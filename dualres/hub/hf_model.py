"""The causal LM that `transformers` knows: a decoder with its cache objects, generation, pipelines and `Trainer`."""
# B batch  T tokens  P past and present tokens  D width  V vocabulary

import dataclasses
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from dualres.hub.hf_config import DualResConfig
from dualres.model.attention import RouterReport
from dualres.model.block import recompute_blocks
from dualres.model.decoder import Decoder, reset_module
from dualres.residual import registry

SHARD = "5GB"  # of weights in one file
ALIGNMENT = 64  # bytes; at other addresses, as tensors lie in a file, products of matrices may round otherwise


class DualResForCausalLM(PreTrainedModel, GenerationMixin):
    """A `Decoder` as a Hugging Face model. Attention runs through PyTorch's scaled dot product."""

    config_class = DualResConfig
    base_model_prefix = "decoder"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True

    def __init__(self, config: DualResConfig, decoder: Decoder | None = None):
        super().__init__(config)
        self.decoder = decoder or Decoder(config.model_config, config.residual_config)
        self.gradient_checkpointing = False
        self.post_init()

    @classmethod
    def of(cls, decoder: Decoder, **tokens: int) -> "DualResForCausalLM":
        """A decoder as it is, its weights shared and not copied. `tokens`: eos_token_id, say"""
        residual = registry.explicit(decoder.residual_config, 2 * decoder.config.layers)
        model = dataclasses.replace(decoder.config, vocab_size=decoder.vocabulary.table.num_embeddings)
        config = DualResConfig.of(model, residual, **tokens)
        config.dtype = decoder.norm.weight.dtype
        return cls(config, decoder)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token, and the loss where `labels` (B,T) are given, −100 where they do not count.

        input_ids (B,T) or inputs_embeds (B,T,D), attention_mask (B,P) with 0 where a token is padding,
        position_ids (B,T) -> logits (B,T,V), or those of the last `logits_to_keep` tokens
        """
        for asked in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(asked, None):
                raise ValueError(f"{asked}=True: a dualres model gives logits, loss and cache; leave it out")
        embedding = inputs_embeds if input_ids is None else self.decoder.vocabulary.embed(input_ids)
        if embedding is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("give either input_ids or inputs_embeds")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        if recomputed and past_key_values is not None:
            raise ValueError(
                "a block that gradient checkpointing runs again would append to the cache again: leave past_key_values "
                "out, or call gradient_checkpointing_disable()"
            )
        if use_cache and past_key_values is None and not self.training and not recomputed:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            position_ids = _positions(embedding, attention_mask, past_key_values)
        mask: Any = create_causal_mask(
            config=self.config,
            inputs_embeds=embedding,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,
        )
        moe = self.decoder.config.moe
        report = None if moe is None else RouterReport(attached=labels is None)
        context = self.decoder.context(embedding, position_ids, mask, past_key_values, report)
        hidden = self.decoder.norm(self.decoder.stack(embedding, context=context))
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.decoder.vocabulary.logits(hidden[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
            if moe is not None and report is not None:
                # Its gradient follows whatever scales the loss; its value stays out of the number that is logged.
                weight = moe.aux_coefficient * _share_of_step(labels, kwargs)
                auxiliary = weight * torch.stack(list(report.losses.values())).sum()
                loss = loss + (auxiliary - auxiliary.detach())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.vocabulary.table

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.vocabulary.table = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The output weights, None where they are the table's."""
        return self.decoder.vocabulary.output

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.decoder.vocabulary.output = value

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Config and code, weights in safetensors."""
        kwargs.setdefault("max_shard_size", SHARD)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a saved model. Only safetensors are read; tensors that are missing or too many are refused."""
        told = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True, "output_loading_info": True}
        )
        model, found = loaded
        wrong = [
            f"{kind}: {sorted(found[f'{kind}_keys'])[0]}" for kind in ("missing", "unexpected") if found[f"{kind}_keys"]
        ]
        if wrong:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} do not match its config ({', '.join(wrong)}): restore "
                "both from one place"
            )
        places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
        if len(places) > 1:
            raise ValueError(
                f"device_map spreads the model over {', '.join(sorted(places))}, and it runs on one device: "
                "name one, device_map='cuda:0' say, or shard it with FSDP2"
            )
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()
        return (model, found) if told else model

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Blocks are what is recomputed."""
        self.gradient_checkpointing = enable
        recompute_blocks(self.decoder.stack, "full" if enable else "none")

    def init_weights(self) -> None:
        """Nothing to do: the decoder has drawn its weights, and what is tied is one tensor."""

    def _init_weights(self, module: nn.Module) -> None:
        """What `transformers` calls for new rows of a table that is resized."""
        reset_module(module, self.decoder.config.init_std, None)


def _positions(embedding: Tensor, attention_mask: Tensor | None, cache: Any) -> Tensor:
    """Counted from the first real token. -> (B or 1,T)"""
    past, length = (0 if cache is None else cache.get_seq_length()), embedding.shape[1]
    if attention_mask is None or attention_mask.ndim != 2:
        return torch.arange(past, past + length, device=embedding.device)[None]
    return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + length]


def _share_of_step(labels: Tensor | None, kwargs: dict[str, Any]) -> float:
    """How much of an optimizer step this batch is, by its targets, as the loss counts them."""
    whole = kwargs.get("num_items_in_batch")
    if labels is None or whole is None:
        return 1.0
    return float((labels[:, 1:] != -100).sum() / whole)

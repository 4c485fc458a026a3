"""The decoder as a `transformers` causal LM: caches, generation, pipelines and `Trainer`."""
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
from dualres.model.attention import RouterReport, token_positions
from dualres.model.block import recompute_blocks
from dualres.model.decoder import Decoder, reset_module
from dualres.residual import registry

SHARD = "5GB"  # of weights per file
ALIGNMENT = 64  # bytes; memory-mapped tensors at other addresses may round matrix products differently


class DualResForCausalLM(PreTrainedModel, GenerationMixin):
    """A `Decoder` as a Hugging Face model. Attention uses PyTorch's scaled dot-product attention."""

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
        """Wrap a decoder and share its weights. `tokens` are token ids such as eos_token_id."""
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
        """Compute next-token logits, and the loss if `labels` (B,T) are passed; labels of −100 are ignored.

        input_ids (B,T) or inputs_embeds (B,T,D), attention_mask (B,P) with 0 for padding,
        position_ids (B,T) -> logits (B,T,V), or those of the last `logits_to_keep` tokens only
        """
        for name in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(name, None):
                raise ValueError(f"{name}=True is not supported, only logits, loss and cache are returned: remove it")
        embedding = inputs_embeds if input_ids is None else self.decoder.vocabulary.embed(input_ids)
        if embedding is None or (input_ids is not None and inputs_embeds is not None):
            raise ValueError("pass either input_ids or inputs_embeds")
        use_cache = self.config.use_cache if use_cache is None else use_cache
        recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        if recomputed and past_key_values is not None:
            raise ValueError(
                "gradient checkpointing would append to the cache twice: do not pass past_key_values, or call "
                "gradient_checkpointing_disable()"
            )
        if use_cache and past_key_values is None and not self.training and not recomputed:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = 0 if past_key_values is None else past_key_values.get_seq_length()
            padding = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
            position_ids = token_positions(embedding.shape[1], past, padding, embedding.device)
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
                # Its gradient is scaled with the loss; its value is not part of the logged loss.
                weight = moe.aux_coefficient * _fraction_of_step(labels, kwargs)
                auxiliary = weight * torch.stack(list(report.losses.values())).sum()
                loss = loss + (auxiliary - auxiliary.detach())
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)  # type: ignore[arg-type]

    def get_input_embeddings(self) -> nn.Module:
        return self.decoder.vocabulary.table

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.decoder.vocabulary.table = cast(nn.Embedding, value)

    def get_output_embeddings(self) -> nn.Module | None:
        """The output projection; None if it is tied to the embedding."""
        return self.decoder.vocabulary.output

    def set_output_embeddings(self, value: nn.Linear) -> None:
        self.decoder.vocabulary.output = value

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """Save config, code, and weights in safetensors."""
        kwargs.setdefault("max_shard_size", SHARD)
        super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a saved model from safetensors; raises if tensors are missing or unexpected."""
        return_info = kwargs.pop("output_loading_info", False)
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, **{**kwargs, "use_safetensors": True, "output_loading_info": True}
        )
        model, info = loaded
        problems = [
            f"{kind}: {sorted(info[f'{kind}_keys'])[0]}" for kind in ("missing", "unexpected") if info[f"{kind}_keys"]
        ]
        if problems:
            raise ValueError(
                f"the weights of {pretrained_model_name_or_path} do not match its config ({', '.join(problems)}): "
                "restore both from the same source"
            )
        devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
        if len(devices) > 1:
            raise ValueError(
                f"device_map splits the model over {', '.join(sorted(devices))}, but dualres models run on one device: "
                "use one, such as device_map='cuda:0', or shard it with FSDP2"
            )
        for parameter in model.parameters():
            if parameter.device.type == "cpu" and parameter.data_ptr() % ALIGNMENT:
                parameter.data = parameter.data.clone()
        return (model, info) if return_info else model

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        """Recompute blocks in the backward pass."""
        self.gradient_checkpointing = enable
        recompute_blocks(self.decoder.stack, "full" if enable else "none")

    def init_weights(self) -> None:
        """No-op: the decoder is already initialized, and tied weights share one tensor."""

    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the new rows when `transformers` resizes an embedding."""
        reset_module(module, self.decoder.config.init_std, None)


def _fraction_of_step(labels: Tensor | None, kwargs: dict[str, Any]) -> float:
    """The fraction of an optimizer step's targets that are in this batch, as the loss counts them."""
    total = kwargs.get("num_items_in_batch")
    if labels is None or total is None:
        return 1.0
    return float((labels[:, 1:] != -100).sum() / total)

"""Models between runs, Hugging Face folders and Llama's family.

open_model  the one way to open a run, an exported folder or a Hugging Face causal LM
export      write a run as a Hugging Face folder or a Llama checkpoint, and import it again
convert     put a Llama, Mistral or Qwen on another residual pathway with unchanged outputs
hf_model    the decoder as a `PreTrainedModel`; hf_config beside it
megatron    the residual pathways in a Megatron-Core GPT

Importing this package registers dualres models with the Auto classes of `transformers`, where it is installed:
`import dualres.hub`, then `AutoModelForCausalLM.from_pretrained(folder)`.
"""

import contextlib

from dualres.util import optional_dependencies


def register() -> None:
    """Make the Auto classes of `transformers` know dualres models."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dualres.hub.hf_config import DualResConfig
    from dualres.hub.hf_model import DualResForCausalLM

    AutoConfig.register(DualResConfig.model_type, DualResConfig, exist_ok=True)
    AutoModelForCausalLM.register(DualResConfig, DualResForCausalLM, exist_ok=True)


if not optional_dependencies.on_demand:
    with contextlib.suppress(ImportError):  # without transformers, or with one that is too old, runs still open
        register()

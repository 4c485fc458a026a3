"""Trained models as runs, Hugging Face folders and Llama-family checkpoints.

open_model  opens a run, an exported folder or a Hugging Face causal LM
export      writes a run as a Hugging Face folder or a Llama checkpoint, and imports it again
convert     converts a Llama, Mistral or Qwen to another residual pathway with unchanged outputs
hf_model    the decoder as a `PreTrainedModel`, with `hf_config` as its config
megatron    residual pathways in a Megatron-Core GPT

Their parts: `model_folder` reads and checks a saved model, `llama` maps Llama-family configs and weights to ours,
`model_card` writes the README of an exported folder, `remote_code` bundles the code that loads it without dualres.

Importing this package registers dualres models with the Auto classes of `transformers`, if it is installed:
`import dualres.hub`, then `AutoModelForCausalLM.from_pretrained(folder)`.
"""

import contextlib

from dualres.util import optional_dependencies
from dualres.util.optional_dependencies import MissingExtraError, missing


def register() -> None:
    """Register dualres models with the Auto classes of `transformers`."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM

        from dualres.hub.hf_config import DualResConfig
        from dualres.hub.hf_model import DualResForCausalLM
    except ImportError as error:  # not installed, or too old
        raise MissingExtraError(f"{missing('transformers', 'hub', 'a Hugging Face model')} ({error})") from None

    AutoConfig.register(DualResConfig.model_type, DualResConfig, exist_ok=True)
    AutoModelForCausalLM.register(DualResConfig, DualResForCausalLM, exist_ok=True)


if not optional_dependencies.on_demand:
    with contextlib.suppress(ImportError):  # runs can be opened without transformers, or with an old version
        register()

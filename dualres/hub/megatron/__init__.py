"""Residual pathways in Megatron-Core: a spec for its `GPTModel`, and weights to and from our decoder."""

from dualres.util.optional_dependencies import need

need("megatron.core", "megatron", "dualres.hub.megatron")

from dualres.hub.megatron.config import decay_overrides, gpt_options, transformer_options  # noqa: E402
from dualres.hub.megatron.layer import ResidualLayer  # noqa: E402
from dualres.hub.megatron.spec import layer_spec  # noqa: E402
from dualres.hub.megatron.weights import export_weights, import_weights, with_vocabulary  # noqa: E402

__all__ = [
    "ResidualLayer",
    "decay_overrides",
    "export_weights",
    "gpt_options",
    "import_weights",
    "layer_spec",
    "transformer_options",
    "with_vocabulary",
]

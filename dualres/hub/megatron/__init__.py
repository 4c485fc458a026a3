"""Residual pathways in Megatron-Core.

`layer_spec` gives the layers of a `GPTModel` a residual pathway (`ResidualLayer`); `transformer_options` and
`gpt_options` turn a model config into Megatron's; `decay_overrides` keeps weight decay off gates and queries.
`import_weights` and `export_weights` move weights to and from a `Decoder`, `with_vocabulary` pads the vocabulary.
"""

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

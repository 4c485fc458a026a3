"""Megatron's model on our pathways computes what our decoder does: logits, gradients, weights there and back.

It runs on CPU processes through shim.py: that shows the mathematics and the wiring, and nothing of a GPU.
"""

import dataclasses
import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dualres.config.schema import ConfigError, ModelConfig, ResidualConfig, RopeScaling
from dualres.util.optional_dependencies import MissingExtraError
from tests.hub.megatron.layouts import LAYOUTS
from tests.launching import assert_nothing_wrong
from tests.small import model_config

TIMEOUT = 900  # seconds; a collective that never ends gives up after 300
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")


@needs_megatron
@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_megatron_equals_our_decoder(layout: str, tmp_path: Path):
    """All cases of a layout in one launch: a launch costs more than ten cases."""
    worker = ["-m", "tests.hub.megatron.shim", "tests.hub.megatron.worker"]
    commands = [[*worker, str(rank), str(tmp_path), layout] for rank in range(LAYOUTS[layout].ranks)]
    assert_nothing_wrong(commands, tmp_path, TIMEOUT, ())


def transformer_config(feedforward: str = "dense", **options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from dualres.hub.megatron import transformer_options

    return TransformerConfig(**{**transformer_options(model_config(feedforward)), **options})


REFUSED = {  # what does not work, of every field in the table
    "pipeline_model_parallel_size": 2,
    "recompute_granularity": "full",
    "cuda_graph_impl": "local",
    "mtp_num_layers": 1,
    "fp32_residual_connection": True,
    "layernorm_zero_centered_gamma": True,
    "cpu_offloading": True,
    "fine_grained_activation_offloading": True,
    "heterogeneous_block_specs": True,
    "overlap_moe_expert_parallel_comm": True,
    "inference_fuse_tp_communication": True,
}


@needs_megatron
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("field", "value"), REFUSED.items(), ids=REFUSED)
def test_what_does_not_work_is_refused_by_name(field: str, value: Any):
    from dualres.hub.megatron import layer_spec

    config = transformer_config()
    setattr(config, field, value)  # Megatron itself takes some of them only with others, or with TransformerEngine
    with pytest.raises(ConfigError, match=f"^{field}={value!r} of Megatron's config .*: use "):
        layer_spec(config, "dar-block")


@needs_megatron
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_refusal_has_a_row():
    from dualres.hub.megatron import spec

    assert REFUSED.keys() == spec.SUPPORTED.keys()


@needs_megatron
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_layers_are_those_of_the_config():
    from megatron.core.transformer.torch_norm import L2Norm
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from dualres.hub.megatron import layer_spec, transformer_options

    def submodules(config: Any) -> list[Any]:
        return [layer.submodules for layer in layer_spec(config, "dar-block").layer_specs]

    mixed = transformer_config("moe", moe_layer_freq=[0, 1, 1, 0, 1])
    assert [s.mlp.module.__name__ for s in submodules(mixed)] == ["MLP", "MoELayer", "MoELayer", "MLP", "MoELayer"]
    latent = MLATransformerConfig(**transformer_options(model_config()))
    assert submodules(latent)[0].self_attention.module.__name__ == "MLASelfAttention"
    assert submodules(transformer_config(qk_l2_norm=True))[0].self_attention.submodules.q_layernorm is L2Norm
    other = transformer_config()
    other.experimental_attention_variant = "dsa"
    with pytest.raises(ConfigError, match=r"^experimental_attention_variant='dsa' .*: pass it as `layers`"):
        layer_spec(other, "dar-block")


@needs_megatron
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_spec_of_other_layers_is_refused():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from dualres.hub.megatron import ResidualLayer, layer_spec

    config = transformer_config()
    with pytest.raises(ConfigError, match="has 1 layers but num_layers=5: use one per layer"):
        layer_spec(config, "dar-block", TransformerBlockSubmodules([ModuleSpec(ResidualLayer)]))
    with pytest.raises(ConfigError, match="has a ResidualLayer: residual pathways support"):
        layer_spec(config, "dar-block", ModuleSpec(ResidualLayer))
    plain = get_gpt_layer_local_spec(normalization="RMSNorm")
    crossed = dataclasses.replace(plain.submodules, cross_attention=plain.submodules.self_attention)
    with pytest.raises(ConfigError, match=r"has cross_attention.* remove it"):
        layer_spec(config, "dar-block", ModuleSpec(TransformerLayer, submodules=crossed))
    with pytest.raises(ConfigError, match=r"gate_scale=.* is not an option of attnres-block"):
        layer_spec(config, ResidualConfig("attnres-block", gate_scale=1.0))


@needs_megatron
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "model",
    [
        model_config(attention_bias="all"),
        model_config(embedding_width=16),
        model_config(rope_scaling=RopeScaling("linear", 2.0)),
        model_config(read_eps=(1e-6,) * 11),
    ],
    ids=["attention_bias", "embedding_width", "rope_scaling", "read_eps"],
)
def test_models_that_megatron_has_not_are_refused(model: ModelConfig, request: pytest.FixtureRequest):
    from dualres.hub.megatron import transformer_options

    with pytest.raises(ConfigError, match=f"^model.{request.node.callspec.id}=.* is not supported in a Megatron"):
        transformer_options(model)


def test_without_megatron_the_error_has_the_command(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("dualres.hub.megatron")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron", None)
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        MissingExtraError, match=r"dualres.hub.megatron needs the package megatron.*pip install -e '.\[megatron\]'"
    ):
        importlib.import_module("dualres.hub.megatron")

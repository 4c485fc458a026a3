"""dualres: the residual pathway of a Transformer as a replaceable part."""

from dualres.config.loading import load_config
from dualres.config.schema import Config, ConfigError, ModelConfig, MoEConfig, ResidualConfig, TrainConfig
from dualres.hub.register import register
from dualres.model.attention import KVCache, RouterReport
from dualres.model.block import ResidualBlock, ResidualStack, compile_blocks, recompute_blocks, residual_stack
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.generation import generate
from dualres.util.amx import avoid_hidden_tiles
from dualres.util.version import VERSION

__version__ = VERSION
avoid_hidden_tiles()
register()

__all__ = [
    "Config",
    "ConfigError",
    "Decoder",
    "KVCache",
    "MoEConfig",
    "ModelConfig",
    "ResidualBlock",
    "ResidualConfig",
    "ResidualStack",
    "RouterReport",
    "TrainConfig",
    "build_decoder",
    "compile_blocks",
    "generate",
    "load_config",
    "recompute_blocks",
    "residual_stack",
]

"""dualres: the residual pathway of a Transformer as a replaceable part."""

from dualres.config import Config, ConfigError, ModelConfig, MoEConfig, ResidualConfig, TrainConfig
from dualres.experiment import load_config
from dualres.hub.register import register
from dualres.model.block import ResidualBlock, ResidualStack, compile_blocks, recompute_blocks, residual_stack
from dualres.model.context import KVCache, RouterReport
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.generate import generate
from dualres.processor import avoid_hidden_tiles
from dualres.version import VERSION

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

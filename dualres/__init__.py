"""dualres: the residual pathway of a Transformer as a replaceable part."""

from importlib.metadata import PackageNotFoundError, version

from dualres.config import Config, ConfigError, ModelConfig, MoEConfig, ResidualConfig, TrainConfig
from dualres.experiment import load_config
from dualres.model.block import ResidualBlock, ResidualStack, compile_blocks, residual_stack
from dualres.model.context import KVCache, RouterReport
from dualres.model.decoder import Decoder, build_decoder
from dualres.model.generate import generate

try:
    __version__ = version("dualres")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"

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
    "residual_stack",
]

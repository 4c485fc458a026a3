"""dualres: the residual pathway of a Transformer as a replaceable part.

The names below are imported on first use, so that `import dualres` is fast; it sets no environment variable, installs
no import hook and changes no warning filter. `import dualres.hub` registers dualres models with the Auto classes of
`transformers`.
"""

import importlib

TYPE_CHECKING = False  # that of typing, whose import takes longer than everything else here
if TYPE_CHECKING:
    from typing import Any

    from dualres.config.loading import load_config as load_config
    from dualres.config.schema import Config as Config
    from dualres.config.schema import ConfigError as ConfigError
    from dualres.config.schema import ModelConfig as ModelConfig
    from dualres.config.schema import MoEConfig as MoEConfig
    from dualres.config.schema import ResidualConfig as ResidualConfig
    from dualres.config.schema import TrainConfig as TrainConfig
    from dualres.model.attention import KVCache as KVCache
    from dualres.model.attention import RouterReport as RouterReport
    from dualres.model.block import NormedBranch as NormedBranch
    from dualres.model.block import ResidualBlock as ResidualBlock
    from dualres.model.block import ResidualStack as ResidualStack
    from dualres.model.block import compile_blocks as compile_blocks
    from dualres.model.block import recompute_blocks as recompute_blocks
    from dualres.model.block import residual_stack as residual_stack
    from dualres.model.decoder import Decoder as Decoder
    from dualres.model.decoder import build_decoder as build_decoder
    from dualres.model.generation import generate as generate
    from dualres.residual.registration import register_method as register_method
    from dualres.train.optimizer import optimizer_groups as optimizer_groups

__version__: str

_MODULES = {
    "config.loading": ("load_config",),
    "config.schema": ("Config", "ConfigError", "MoEConfig", "ModelConfig", "ResidualConfig", "TrainConfig"),
    "model.block": (
        *("NormedBranch", "ResidualBlock", "ResidualStack"),
        *("compile_blocks", "recompute_blocks", "residual_stack"),
    ),
    "model.attention": ("KVCache", "RouterReport"),
    "model.decoder": ("Decoder", "build_decoder"),
    "model.generation": ("generate",),
    "residual.registration": ("register_method",),
    "train.optimizer": ("optimizer_groups",),
}
_HOME = {name: f"dualres.{module}" for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> "Any":
    if name == "__version__":
        value = importlib.import_module("dualres.util.version").VERSION
    elif name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    else:
        raise AttributeError(f"module 'dualres' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

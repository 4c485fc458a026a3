"""Experiments: what a model, its residual method and its training are.

    load_config("0.1b", "dar-block", ["train.tokens=1e9"])    a scale, a residual method, overrides
    ModelConfig, ResidualConfig, TrainConfig, …               the same in Python

schema.py defines every key with its documentation, loading.py reads YAML, validation.py converts and checks values,
and paper.py has the numbers that the paper prints.
"""

from dualres.config.loading import load_config
from dualres.config.schema import (
    AnalyzeConfig,
    Config,
    ModelConfig,
    MoEConfig,
    ParallelConfig,
    ResidualConfig,
    RopeScaling,
    TrainConfig,
)
from dualres.config.validation import ConfigError

__all__ = [
    "AnalyzeConfig",
    "Config",
    "ConfigError",
    "MoEConfig",
    "ModelConfig",
    "ParallelConfig",
    "ResidualConfig",
    "RopeScaling",
    "TrainConfig",
    "load_config",
]

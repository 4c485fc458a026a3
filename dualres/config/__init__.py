"""Experiments: a model, its residual method and its training recipe.

    loading.load_config("0.1b", "dar-block", ["train.tokens=1e9"])    a scale, a residual method, overrides
    schema.ModelConfig, ResidualConfig, TrainConfig, …                the same in Python

schema.py defines every key with its documentation (documentation.py finds it), loading.py reads YAML, validation.py
converts and checks values, plugins.py imports modules that register methods, and paper.py has the numbers printed in
the paper, which it reads from paper.yaml.
"""

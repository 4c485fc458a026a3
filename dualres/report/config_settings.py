"""Configs as settings under dotted keys, and what tells several apart."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dualres.config.schema import Config
from dualres.residual.registry import settled

Settings = Mapping[str, Any]  # dotted key -> value

_WORD = re.compile(r"[A-Za-z][\w./-]*")


def settings(config: Config) -> dict[str, Any]:
    """Every value under its dotted key: train.seed, say."""
    return _flat(dataclasses.asdict(config), "")


def written_out(config: Config) -> Config:
    """The same experiment with every option of its residual, so that a default equals the value that it stands for."""
    return dataclasses.replace(config, residual=settled(config.residual, 2 * config.model.layers))


def differing(several: Sequence[Settings]) -> list[str]:
    """What tells each from the others: 'tokens=1000, share_parameters=false'; empty where all are equal."""
    keys = dict.fromkeys(key for given in several for key in given)
    telling = [key for key in keys if len({repr(given.get(key)) for given in several}) > 1]
    return [", ".join(f"{key.split('.', 1)[-1]}={plain(given.get(key))}" for key in telling) for given in several]


def as_yaml(config: Config) -> str:
    """The whole config, in the form of the files in `configs/`."""
    return yaml.safe_dump(json.loads(json.dumps(dataclasses.asdict(config))), sort_keys=False, allow_unicode=True)


def plain(value: Any) -> str:
    """As `--set` reads it: text that YAML would take for something else is quoted."""
    if isinstance(value, str) and _WORD.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


def _flat(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in data.items():
        found.update(_flat(value, f"{where}{key}.") if isinstance(value, dict) else {f"{where}{key}": value})
    return found

"""The command that reproduces a config: the closest shipped scale and residual, and overrides for the rest."""

import contextlib
import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from dualres.config.loading import load_config, names
from dualres.config.plugins import REGISTERED
from dualres.config.schema import Config, ConfigError
from dualres.train.launch import launch_command

FlatConfig = Mapping[str, Any]  # dotted key -> value

_WORD = re.compile(r"[A-Za-z][\w./-]*")


class Origin(NamedTuple):
    """A pair of shipped configs with overrides."""

    scale: str
    residual: str
    overrides: tuple[str, ...]

    def changes(self, section: str) -> bool:
        """Whether an override belongs to this section, such as "model"."""
        return any(override.startswith(f"{section}.") for override in self.overrides)


def origin(config: Config) -> Origin | None:
    """The pair with the fewest overrides, those of the model first; None if no pair yields the config."""
    target = settings(config)
    candidates = []
    for (scale, residual), shipped in _shipped(tuple(names("residual"))).items():
        if shipped["residual.method"] == config.residual.method:
            changed = [key for key, value in target.items() if key not in shipped or shipped[key] != value]
            changed += [key for key in shipped if key.startswith("residual.") and key not in target]
            in_model = sum(key.startswith("model.") for key in changed)
            candidates.append((in_model, len(changed), scale, residual, changed))
    if not candidates:
        return None
    *_, scale, residual, changed = min(candidates)
    for more in ([], ["train.warmup_steps"]):  # a recipe's warmup is shortened in short runs, unless it is set
        overrides = (f"{key}={as_override(target.get(key))}" for key in [*changed, *more])
        closest = Origin(scale, residual, tuple(overrides))
        # Overrides cannot express everything, such as a block method without a default block size.
        with contextlib.suppress(ConfigError):
            if load_config(*closest) == config:
                return closest
    return None


def command(origin: Origin, data: str, processes: int = 1) -> str:
    """A shell command with one override per line."""
    options = {"data": data, "plugin": REGISTERED.get(origin.residual)}
    return launch_command(*origin, options, processes=processes, separator=" \\\n  ")


def settings(config: Config) -> dict[str, Any]:
    """Every value of the config under its dotted key, such as train.seed."""

    def flat(data: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        flattened: dict[str, Any] = {}
        for key, value in data.items():
            flattened |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return flattened

    return flat(config.to_dict(), "")


def differing(own: FlatConfig, several: Sequence[FlatConfig]) -> str:
    """The settings that distinguish one of several, such as 'tokens=1000, clip=2.0'; empty if all are equal."""
    keys = dict.fromkeys(key for each in several for key in each)
    varying = [key for key in keys if len({repr(each.get(key)) for each in several}) > 1]
    return ", ".join(f"{key.split('.', 1)[-1]}={as_override(own.get(key))}" for key in varying)


def as_yaml(config: Config) -> str:
    """The whole config, in the format of the files in `configs/`."""
    return yaml.safe_dump(json.loads(json.dumps(config.to_dict())), sort_keys=False, allow_unicode=True)


def as_override(value: Any) -> str:
    """A value as `--set` parses it; text that YAML would read as another type is quoted."""
    if isinstance(value, str) and _WORD.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)


@functools.cache
def _shipped(residuals: tuple[str, ...]) -> dict[tuple[str, str], FlatConfig]:
    pairs = itertools.product(names("scale"), residuals)
    return {pair: settings(load_config(*pair)) for pair in pairs}

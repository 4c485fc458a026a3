"""Which command makes a config: the shipped scale and residual that are nearest to it, and overrides for the rest."""

import functools
import itertools
from typing import NamedTuple

from dualres.config.loading import load_config, names
from dualres.config.schema import Config, ConfigError
from dualres.report.config_settings import Settings, plain, settings
from dualres.train.launch import launch_command


class Origin(NamedTuple):
    """Configs that ship, and what is laid over them."""

    scale: str
    residual: str
    overrides: tuple[str, ...]

    def changes(self, section: str) -> bool:
        """Whether an override is of this section: "model", say."""
        return any(override.startswith(f"{section}.") for override in self.overrides)


def origin(config: Config) -> Origin | None:
    """The pair with the fewest overrides, those of the model counting first; None where no pair leads to the config."""
    wanted = settings(config)
    nearest: tuple[int, int, str, str, list[str]] | None = None
    for (scale, residual), shipped in _shipped().items():
        if shipped["residual.method"] == config.residual.method:
            changed = [key for key, value in wanted.items() if key not in shipped or shipped[key] != value]
            of_model = sum(key.startswith("model.") for key in changed)
            near = of_model, len(changed), scale, residual, changed
            nearest = near if nearest is None else min(near, nearest)
    if nearest is None:
        return None
    *_, scale, residual, changed = nearest
    found = Origin(scale, residual, tuple(f"{key}={plain(wanted[key])}" for key in changed))
    return found if _makes(found, config) else None


def command(found: Origin, data: str, processes: int = 1) -> str:
    """For a shell, an override per line."""
    return launch_command(
        found.scale, found.residual, found.overrides, {"data": data}, processes=processes, separator=" \\\n  "
    )


def _makes(found: Origin, config: Config) -> bool:
    """An override cannot say everything: that a block form has no block size, say."""
    try:
        return load_config(*found) == config
    except ConfigError:
        return False


@functools.cache
def _shipped() -> dict[tuple[str, str], Settings]:
    pairs = itertools.product(names("scale"), names("residual"))
    return {pair: settings(load_config(*pair)) for pair in pairs}

"""Experiments: one scale and one residual, read from YAML, with overrides from the command line."""

import dataclasses
import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from dualres.config.schema import Config, ConfigError, ModelConfig, ResidualConfig
from dualres.config.validation import build, convert

_PACKAGE = Path(__file__).parent.parent
# Inside the package when installed, beside it in a checkout.
CONFIGS = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), _PACKAGE / "configs")


def load_config(scale: str, residual: str, overrides: Sequence[str] = ()) -> Config:
    """The experiment SCALE × RESIDUAL: names from `configs/`, or paths of YAML files, then `key.path=value` overrides.

    The scale's `branches_per_block` goes to a residual that has no block size of its own: to the block forms.
    """
    data = _read("scale", scale)
    _merge(data, {"residual": _read("residual", residual)})
    _override(data, overrides)
    scale_block = convert(int | None, data.pop("branches_per_block", None), "branches_per_block")
    config = build(Config, data, "")
    from dualres.residual import registry  # here, because it imports torch: command-line help needs `names` alone

    block_form = registry.method(config.residual.method).branches_per_block is None
    if scale_block is None or config.residual.branches_per_block is not None or not block_form:
        return config
    return dataclasses.replace(config, residual=dataclasses.replace(config.residual, branches_per_block=scale_block))


def load_recipe(scale: str, model: ModelConfig, residual: ResidualConfig, overrides: Sequence[str] = ()) -> Config:
    """The training recipe of SCALE for a model that is there already, then overrides of the recipe and the context."""
    for override in overrides:
        if override.startswith(("model.", "residual.")) and not override.startswith("model.context="):
            raise ConfigError(
                f"--set {override}: a model that is there already stays what it is; set train.… or model.context"
            )
    data = {**_read("scale", scale), "model": dataclasses.asdict(model), "residual": dataclasses.asdict(residual)}
    data.pop("branches_per_block", None)
    _override(data, overrides)
    return build(Config, data, "")


def load_residual(
    residual: str, model: ModelConfig, overrides: Sequence[str] = ()
) -> tuple[ModelConfig, ResidualConfig]:
    """A model that is there already, on RESIDUAL, then overrides."""
    data = {"model": dataclasses.asdict(model), "residual": _read("residual", residual)}
    _override(data, overrides)
    return build(ModelConfig, data["model"], "model."), build(ResidualConfig, data["residual"], "residual.")


def short_name(name: str) -> str:
    """How a scale or residual is called in folders and tables: its name, or its file's."""
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name


def names(kind: Literal["scale", "residual"]) -> list[str]:
    """The configs that ship with dualres, by name."""
    return sorted(path.stem for path in (CONFIGS / kind).glob("*.yaml"))


def _read(kind: Literal["scale", "residual"], name: str, beneath: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file; a key `base` names another (a path counts from the file's folder), over which it is laid.

    `beneath` holds the files that this one is the base of.
    """
    folder = beneath[-1].parent if beneath else Path()
    path = folder / name if name.endswith((".yaml", ".yml")) else CONFIGS / kind / f"{name}.yaml"
    if not os.path.isfile(path):  # unlike Path.is_file, also of a name that is too long for any file
        close = difflib.get_close_matches(name, names(kind), 1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no {kind} {name!r}: {hint}use one of {', '.join(names(kind))}, or the path of a YAML file")
    try:
        data = _yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no mapping: write key: value lines as in configs/{kind}/")
    base = data.pop("base", None)
    if base is None:
        return data
    if path.resolve() in beneath:
        raise ConfigError(f"{path} is its own base: remove base, or name a file that does not lead back to it")
    under = _read(kind, str(base), (*beneath, path.resolve()))
    _merge(under, data)
    return under


def overridden(overrides: Sequence[str]) -> dict[str, Any]:
    """What overrides say, in sections: of `train.parallel.tensor=2` and of `train.parallel={tensor: 2}` the same."""
    data: dict[str, Any] = {}
    _override(data, overrides)
    return data


def _override(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Lay `key.path=value` overrides on `data`."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key.path=value: write model.layers=8")
        value = _yaml(text, f"override {override!r}")
        for key in reversed(path.split(".")):
            value = {key: value}
        _merge(data, value)


def _yaml(text: str, where: str) -> Any:
    """Plain YAML, without tags that build objects."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}") from None


def _merge(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Lay `over` on `into`, section by section."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value

"""Load an experiment: the YAML of a scale, the YAML of a residual method, and overrides from the command line."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from dualres.config.plugins import REGISTERED
from dualres.config.schema import Config, ConfigError, ModelConfig, ResidualConfig
from dualres.config.validation import build, did_you_mean

_PACKAGE = Path(__file__).parent.parent
# Inside the package when installed, next to it in a checkout.
CONFIGS = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), _PACKAGE / "configs")


def load_config(scale: str, residual: str, overrides: Sequence[str] = ()) -> Config:
    """The experiment SCALE × RESIDUAL: names in `configs/` or paths of YAML files, then `key.path=value` overrides."""
    data = _read("scale", scale)
    _merge(data, {"residual": _read("residual", residual)})
    _override(data, overrides)
    return _build(data, scale, overrides)


def load_recipe(scale: str, model: ModelConfig, residual: ResidualConfig, overrides: Sequence[str] = ()) -> Config:
    """The training recipe of SCALE for an existing model, with overrides of the recipe and the context."""
    for override in overrides:
        if override.startswith(("model.", "residual.")) and not override.startswith("model.context="):
            raise ConfigError(f"--set {override}: an existing model cannot be changed; set train.… or model.context")
    data = {**_read("scale", scale), "model": asdict(model), "residual": residual.to_dict()}
    _override(data, overrides)
    return _build(data, scale, overrides)


def recipe_warmup(scale: str, overrides: Sequence[str]) -> int | None:
    """The warmup of the shipped scale that SCALE is or derives from; None if the user has set another."""
    if "warmup_steps" in _train(parse_overrides(overrides)):
        return None
    for path, data in _files("scale", scale):
        if "warmup_steps" in _train(data):
            return _train(data)["warmup_steps"] if path.resolve().parent == (CONFIGS / "scale").resolve() else None
    return None


def shortened_warmup(config: Config, scale: str, overrides: Sequence[str]) -> str | None:
    """What to tell the user if the run is too short for the warmup of its recipe."""
    recipe, warmup = recipe_warmup(scale, overrides), config.train.warmup_steps
    if recipe is None or warmup == recipe:
        return None
    return (
        f"shortened from {recipe} steps to {warmup}, a quarter of the {config.steps} steps that "
        f"train.tokens={config.train.tokens} allow: to choose it yourself, set train.warmup_steps"
    )


def _build(data: dict[str, Any], scale: str, overrides: Sequence[str]) -> Config:
    """The config; a warmup that the user has not set takes at most a quarter of the steps."""
    config: Config | None = None
    with contextlib.suppress(ConfigError):
        config = build(Config, data, "")
    if config is not None and config.train.warmup_steps <= _longest_warmup(config):
        return config
    recipe = recipe_warmup(scale, overrides)
    if recipe is None or not _train(data):
        return config or build(Config, data, "")  # which raises again
    config = build(Config, {**data, "train": {**_train(data), "warmup_steps": 0}}, "")
    return replace(config, train=replace(config.train, warmup_steps=min(recipe, _longest_warmup(config))))


def _longest_warmup(config: Config) -> int:
    return max(1, config.steps // 4)


def load_residual(
    residual: str, model: ModelConfig, overrides: Sequence[str] = ()
) -> tuple[ModelConfig, ResidualConfig]:
    """An existing model with the residual method RESIDUAL, with overrides of both."""
    data = {"model": asdict(model), "residual": _read("residual", residual)}
    _override(data, overrides)
    return build(ModelConfig, data["model"], "model."), build(ResidualConfig, data["residual"], "residual.")


def short_name(name: str) -> str:
    """The name of a scale or residual in folders and tables; for a YAML file, its stem."""
    return Path(name).stem if name.endswith((".yaml", ".yml")) else name


def names(kind: Literal["scale", "residual"]) -> list[str]:
    """Names of the configs that ship with dualres, and of registered methods."""
    shipped = (path.stem for path in (CONFIGS / kind).glob("*.yaml"))
    return sorted([*shipped, *(REGISTERED if kind == "residual" else ())])


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Overrides as nested sections: `train.parallel.tensor=2` and `train.parallel={tensor: 2}` are the same."""
    data: dict[str, Any] = {}
    _override(data, overrides)
    return data


def _override(data: dict[str, Any], overrides: Sequence[str]) -> None:
    """Merge overrides into `data`, in order."""
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key.path=value: write model.layers=8")
        value = _parse(text, f"override {override!r}")
        for key in reversed(path.split(".")):
            value = {key: value}
        _merge(data, value)


def _read(kind: Literal["scale", "residual"], name: str) -> dict[str, Any]:
    """A YAML file merged over its `base`."""
    merged: dict[str, Any] = {}
    for _, data in reversed([*_files(kind, name)]):
        _merge(merged, data)
    return merged


def _files(kind: Literal["scale", "residual"], name: str) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The YAML file of a config, its `base`, the base of that, and so on.

    A relative path starts at the folder of the file that names it. A registered method needs no file.
    """
    folder, seen = Path(), set[Path]()
    base: str | None = name
    while base is not None:
        if kind == "residual" and base in REGISTERED:
            yield Path(base), {"method": base}
            return
        path = folder / base if base.endswith((".yaml", ".yml")) else CONFIGS / kind / f"{base}.yaml"
        if not os.path.isfile(path):  # unlike Path.is_file, does not raise for a name that is too long
            plugin = ", or --plugin MODULE for a method of your own" if kind == "residual" else ""
            remedy = f"use one of {', '.join(names(kind))}, or the path of a YAML file{plugin}"
            raise ConfigError(f"no {kind} {base!r}: {' '.join([did_you_mean(base, names(kind)), remedy]).strip()}")
        try:
            data = _parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(data, dict):
            raise ConfigError(f"{path} is not a mapping: write key: value lines as in configs/{kind}/")
        base = data.pop("base", None)
        if base is not None and path.resolve() in seen:
            raise ConfigError(f"{path} is its own base: remove base, or set it to a file that does not lead back here")
        folder, base = path.resolve().parent, None if base is None else str(base)
        seen.add(path.resolve())
        yield path, data


def _train(data: dict[str, Any]) -> dict[str, Any]:
    """The section `train`; empty if missing or invalid."""
    section = data.get("train")
    return section if isinstance(section, dict) else {}


class _Loader(yaml.SafeLoader):
    """Plain YAML without tags that create objects. As in YAML 1.2, 3e-4 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d[\d_]*)?\.?\d[\d_]*[eE][-+]?\d+$"), list("-+.0123456789")
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{where} is not valid YAML: {reason}") from None


def _merge(into: dict[str, Any], over: Mapping[str, Any]) -> None:
    """Merge `over` into `into`, section by section."""
    for key, value in over.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value

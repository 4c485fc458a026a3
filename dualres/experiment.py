"""Experiments: one scale and one residual, read from YAML, with overrides from the command line."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from dualres.config import Config, ConfigError
from dualres.residual import registry

_PACKAGE = Path(__file__).parent
# Inside the package when installed, beside it in a checkout.
CONFIGS = next((p for p in (_PACKAGE / "configs", _PACKAGE.parent / "configs") if p.is_dir()), _PACKAGE / "configs")

T = TypeVar("T")


def load_config(scale: str, residual: str, overrides: Sequence[str] = ()) -> Config:
    """The experiment SCALE × RESIDUAL: names from `configs/`, or paths of YAML files, then `key.path=value` overrides.

    The scale's `layers_per_block` goes to a residual that has no block size of its own: to the block forms.
    """
    data = _read("scale", scale)
    scale_block = data.pop("layers_per_block", None)
    _merge(data, {"residual": _read("residual", residual)})
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key.path=value: write model.layers=8")
        value = _yaml(text, f"override {override!r}")
        for key in reversed(path.split(".")):
            value = {key: value}
        _merge(data, value)
    config = _build(Config, data, "")
    block_form = registry.method(config.residual.method).layers_per_block is None
    if scale_block is None or config.residual.layers_per_block is not None or not block_form:
        return config
    scale_block = _convert(float, scale_block, "layers_per_block")
    return dataclasses.replace(config, residual=dataclasses.replace(config.residual, layers_per_block=scale_block))


def names(kind: Literal["scale", "residual"]) -> list[str]:
    """The configs that ship with dualres, by name."""
    return sorted(path.stem for path in (CONFIGS / kind).glob("*.yaml"))


def _read(kind: Literal["scale", "residual"], name: str, beneath: tuple[Path, ...] = ()) -> dict[str, Any]:
    """One YAML file; a key `base` names another (a path counts from the file's folder), over which it is laid.

    `beneath` holds the files that this one is the base of.
    """
    folder = beneath[-1].parent if beneath else Path()
    path = folder / name if name.endswith((".yaml", ".yml")) else CONFIGS / kind / f"{name}.yaml"
    if not path.is_file():
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


def _build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """The dataclass `kind` from a mapping; unknown, missing and mistyped keys are refused by name."""
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, 1)
            remedy = f"did you mean {where}{close[0]}?" if close else f"use one of {', '.join(fields)}"
            raise ConfigError(f"unknown key {where}{key}={data[key]!r}: {remedy}")
    for name, f in fields.items():
        required = f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ConfigError(f"{where}{name} is missing: set it in the file or with --set {where}{name}=…")
    return kind(**{key: _convert(hints[key], value, f"{where}{key}") for key, value in data.items()})


def _convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` asks for. YAML reads 3e-4 as text and 2.0e9 as a float; both are numbers here."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
        return None if value is None else _convert(typing.get_args(hint)[0], value, where)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} is not a section: write {where}.KEY=VALUE")
        return _build(typing.cast(type, hint), value, f"{where}.")
    if typing.get_origin(hint) is Literal:
        # YAML 1.1 reads a bare `off` as false.
        text = {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value
        if text not in typing.get_args(hint):
            raise ConfigError(f"{where}={value!r} is unknown: use {' or '.join(map(str, typing.get_args(hint)))}")
        return text
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != len(items):
            raise ConfigError(f"{where}={value!r} is not a list of {len(items)} numbers: write [0.9, 0.95]")
        return tuple(_convert(h, v, where) for h, v in zip(items, value, strict=True))
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str):
        return value
    if hint in (int, float) and not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if hint is float and math.isfinite(number):
            return number
        if hint is int and math.isfinite(number) and number == int(number):
            return value if isinstance(value, int) else int(number)
    wanted = {bool: "true or false", int: "a whole number", float: "a finite number", str: "text"}[hint]
    raise ConfigError(f"{where}={value!r} is not {wanted}: give {wanted}")

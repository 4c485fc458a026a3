"""Fields of configs: a value becomes the type that its field asks for, or is refused by name with a remedy."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

T = TypeVar("T")
LARGEST = 2**28  # of any size in a model: more would not fit into the address space of tensors


class ConfigError(ValueError):
    """A config that cannot work: the message names the field, the value and the remedy."""


def build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """The dataclass `kind` from a mapping; unknown and missing keys are refused by name. `where` is "train.", say."""
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
    return kind(**data)


def settle(config: object, where: str) -> None:
    """Give every field of a frozen dataclass the type that it asks for; `where` is its path, "train.", say."""
    for name, hint in typing.get_type_hints(type(config)).items():
        object.__setattr__(config, name, convert(hint, getattr(config, name), f"{where}{name}"))


def convert(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint` asks for. YAML reads 3e-4 as text and 2.0e9 as a float; both are numbers here."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):  # X | None
        return None if value is None else convert(typing.get_args(hint)[0], value, where)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, typing.cast(type, hint)):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}={value!r} is not a section: write {where}.KEY=VALUE")
        return build(typing.cast(type, hint), value, f"{where}.")
    if typing.get_origin(hint) is Literal:
        # YAML 1.1 reads a bare `off` as false.
        text = {False: "off", True: "on"}.get(value, value) if isinstance(value, bool) else value
        if text not in typing.get_args(hint):
            raise ConfigError(f"{where}={value!r} is unknown: use {' or '.join(map(str, typing.get_args(hint)))}")
        return text
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if listed and items[1:] == (...,):
            return tuple(convert(items[0], v, where) for v in value)
        if not listed or len(value) != len(items):
            raise ConfigError(f"{where}={value!r} is not a list of {len(items)} numbers: write [0.9, 0.95]")
        return tuple(convert(h, v, where) for h, v in zip(items, value, strict=True))
    if hint in (bool, str) and isinstance(value, hint):
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


def positive(config: object, where: str, *keys: str) -> None:
    """Refuse fields that are not above zero, and sizes of a model that no tensor can have."""
    for key in keys:
        value = getattr(config, key)
        if not value > 0:
            remedy = "1 or more" if isinstance(value, int) else "a number above 0"
            raise ConfigError(f"{where}{key}={value} is not positive: use {remedy}")
        if where.startswith("model.") and value > LARGEST:
            raise ConfigError(f"{where}{key}={value} is larger than any model: use at most {LARGEST}")


def not_negative(config: object, where: str, *keys: str) -> None:
    """Refuse fields below zero."""
    for key in keys:
        if not getattr(config, key) >= 0:
            raise ConfigError(f"{where}{key}={getattr(config, key)} is negative: use 0 or more")


def multiple_of_8(name: str, value: int) -> None:
    """Refuse widths that the experts' grouped matrix product cannot read."""
    if value % 8:
        raise ConfigError(
            f"{name}={value} is not a multiple of 8, and the experts' grouped matrix product reads rows in units of "
            f"16 bytes: use {value // 8 * 8 or 8} or {(value // 8 + 1) * 8}"
        )


def divides(name: str, part: int, **wholes: int) -> None:
    """Refuse `part` where it does not divide one of the named numbers, and say which parts would."""
    for whole, value in wholes.items():
        if value % part:
            fitting = choices(divisors(math.gcd(*wholes.values())))
            raise ConfigError(f"{name}={part} does not divide model.{whole}={value}: use {fitting}")


def divisors(n: int) -> list[int]:
    """All of them, in order."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def choices(values: list[int]) -> str:
    """Numbers as text: '1, 2, 5 or 10'."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last

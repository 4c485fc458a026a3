"""Validation of config fields: convert a value to its field's type and check its range, or raise with a remedy."""

import dataclasses
import difflib
import inspect
import math
import os
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from dualres.util.errors import ConfigError

T = TypeVar("T")


class Bounds(NamedTuple):
    """The range of a number, as metadata of its type: `Annotated[int, Bounds(minimum=1)]`."""

    minimum: float = -math.inf
    exclusive_minimum: float = -math.inf
    maximum: float = math.inf

    def __str__(self) -> str:
        exclusive = self.exclusive_minimum > -math.inf
        low = f"above {self.exclusive_minimum:g}" if exclusive else f"{self.minimum:g} or more"
        return low if self.maximum == math.inf else f"{low}, at most {self.maximum}"

    def check(self, value: float, where: str) -> None:
        """Raise unless the value is in the range."""
        if not self.minimum <= value <= self.maximum or value <= self.exclusive_minimum:
            raise ConfigError(f"{where}={value} is out of range: it must be {self}")


PositiveInt = Annotated[int, Bounds(minimum=1)]
PositiveFloat = Annotated[float, Bounds(exclusive_minimum=0)]
NonNegativeInt = Annotated[int, Bounds(minimum=0)]
NonNegativeFloat = Annotated[float, Bounds(minimum=0)]
Size = Annotated[int, Bounds(minimum=1, maximum=2**28)]  # larger tensors would not fit into the address space


def build(kind: type[T], data: Mapping[str, Any], where: str) -> T:
    """Make a config class from a mapping; `where` is the path of its keys, such as "train."."""
    parameters = inspect.signature(kind).parameters
    names = [name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    for key in data:
        if key not in names and (len(names) == len(parameters) or not isinstance(key, str)):
            remedy = did_you_mean(key, names, where) or f"use one of {', '.join(names)}"
            raise ConfigError(f"unknown key {where}{key}={data[key]!r}: {remedy}")
    for name in names:
        if parameters[name].default is inspect.Parameter.empty and name not in data:
            raise ConfigError(f"{where}{name} is missing: set it in the file or with --set {where}{name}=…")
    return kind(**data)


def did_you_mean(name: object, known: Sequence[str], where: str = "") -> str:
    """A question with the most similar known name; empty if none is similar."""
    close = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {where}{close[0]}?" if close else ""


def suggesting(message: str, name: object, known: Iterable[str]) -> str:
    """The message, and the most similar known name if there is one."""
    return "; ".join(filter(None, [message, did_you_mean(name, list(known))]))


def suggesting_path(message: str, path: Path) -> str:
    """The message, and the most similar path if this one does not exist."""
    if os.path.exists(path) or not os.path.isdir(path.parent):  # for a name of any length
        return message
    try:
        return suggesting(message, path, (str(path.with_name(other.name)) for other in path.parent.iterdir()))
    except OSError:  # a folder that may not be listed
        return message


def convert_fields(config: object, where: str) -> None:
    """Convert and check every field of a frozen dataclass; `where` is the path of its keys, such as "train."."""
    for name, hint in typing.get_type_hints(type(config), include_extras=True).items():
        object.__setattr__(config, name, convert(hint, getattr(config, name), f"{where}{name}"))


def convert(hint: Any, value: Any, where: str) -> Any:
    """Convert the value to the type `hint` or raise; 2.0e9 is a valid int, and a number may be given as text."""
    if hint is Any:
        return value
    if typing.get_origin(hint) is Annotated:
        plain, bounds = typing.get_args(hint)
        value = convert(plain, value, where)
        bounds.check(value, where)
        return value
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
            valid = [str(choice) for choice in typing.get_args(hint)]
            raise ConfigError(suggesting(f"{where}={value!r} is unknown: use {' or '.join(valid)}", value, valid))
        return text
    if typing.get_origin(hint) is tuple:
        items = typing.get_args(hint)
        listed = isinstance(value, Sequence) and not isinstance(value, str)
        if listed and items[1:] == (...,):
            return tuple(convert(items[0], v, where) for v in value)
        if not listed or len(value) != len(items):
            wanted = "numbers" if items[1:] == (...,) else f"{len(items)} numbers"
            raise ConfigError(f"{where}={value!r} is not a list of {wanted}: write them in brackets, [0.1, 0.2, …]")
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
    raise ConfigError(f"{where}={value!r} is not {wanted}: use {wanted}")


def multiple_of_8(name: str, value: int) -> None:
    """Raise for a width that the experts' grouped matrix product does not support."""
    if value % 8:
        raise ConfigError(
            f"{name}={value} is not a multiple of 8, and the experts' grouped matrix product reads rows in units of "
            f"16 bytes: use {value // 8 * 8 or 8} or {(value // 8 + 1) * 8}"
        )


def at_most(name: str, value: float, limit: str, maximum: float, remedy: str = "") -> None:
    """Raise if a number exceeds another, the field `limit`."""
    if value > maximum:
        raise ConfigError(f"{name}={value} exceeds {limit}={maximum}: use {remedy or f'at most {maximum}'}")


def divides(name: str, part: int, wholes: Mapping[str, int]) -> None:
    """Raise if `part` does not divide every one of the named numbers."""
    for whole, value in wholes.items():
        if value % part:
            fitting = choices(divisors(math.gcd(*wholes.values())))
            raise ConfigError(f"{name}={part} does not divide {whole}={value}: use {fitting}")


def divisors(n: int) -> list[int]:
    """All divisors of n, ascending."""
    small = [k for k in range(1, math.isqrt(n) + 1) if n % k == 0]
    return sorted({*small, *(n // k for k in small)})


def choices(values: Iterable[object], conjunction: str = "or") -> str:
    """Join values in a sentence: '1, 2, 5 or 10'."""
    *others, last = map(str, values)
    return f"{', '.join(others)} {conjunction} {last}" if others else last

"""Adds a residual method of your own to the registry, after checking it."""

import dataclasses
import inspect
import re
import sys
import typing
from functools import partial
from typing import Any

from torch import nn

from dualres.config.documentation import documentation
from dualres.config.loading import names
from dualres.config.plugins import REGISTERED
from dualres.config.schema import ConfigError, ResidualConfig
from dualres.config.validation import convert
from dualres.residual.pathway import Options, Pathway
from dualres.residual.registry import METHODS, Method

NAME = re.compile(r"[a-z0-9]+([-_][a-z0-9]+)*")
TYPES = "bool, int, float, str, Literal, a tuple of these, or Annotated[int, Bounds(…)]"


def register_method(name: str, method: Method) -> None:
    """Make a residual method of your own known by `name`, as if it came with dualres.

    It is then a method of `residual_stack`, `ResidualConfig` and `load_config`, and of the commands, which import the
    module that calls this with `--plugin MODULE`. Calling it again from that module, as a notebook cell does, replaces
    the row. Raises `ConfigError` for a row that would fail later.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ConfigError(f"the method name {name!r} is not valid: use lowercase letters, digits and hyphens")
    module = sys._getframe(1).f_globals["__name__"]  # the caller's, which `--plugin` imports
    if REGISTERED.get(name) != module and (name in METHODS or name in names("residual")):
        owner = f"registered by {REGISTERED[name]}" if name in REGISTERED else "it comes with dualres"
        raise ConfigError(f"the method {name!r} exists already ({owner}): choose another name")
    if problem := _problem(method):
        raise ConfigError(f"the method {name!r} cannot be registered: {problem}")
    METHODS[name] = method
    REGISTERED[name] = module


def _problem(method: Method) -> str | None:
    """What is wrong with a row, and the remedy."""
    if not isinstance(method, Method):
        return f"{method!r} is not a row: pass a Method(streams=…, pathway=…, readout=…, branches_per_block=…)"
    if problem := _options_problem(method.options):
        return problem
    for field, missing in (("streams", "the option `streams`"), ("branches_per_block", "the scale")):
        value = getattr(method, field)
        if value is not None and (not isinstance(value, int) or value < 1):
            return f"{field}={value!r} is not a positive number: use one, or None for {missing}"
    options = {field.name: None for field in dataclasses.fields(method.options)}
    if method.streams is None and "streams" not in options:
        return f"streams=None leaves it to an option that {method.options.__name__} does not have: add `streams: int`"
    options.pop("share_parameters", None)  # of the places, not of the pathway
    for what, base, arguments, keywords in (
        ("pathway", Pathway, ("dim", "place"), {"eps": None, **options}),
        ("readout", nn.Module, ("dim",), {"eps": None}),
    ):
        made = getattr(method, what)
        if not isinstance(_class(made), type) or not issubclass(_class(made), base):
            return f"{what}={made!r} is not a {base.__name__}: pass a subclass of it, or functools.partial of one"
        try:
            inspect.signature(made).bind(*arguments, **keywords)
        except TypeError as error:
            call = ", ".join([*arguments, *(f"{keyword}=" for keyword in keywords)])
            return f"{_class(made).__name__}({call}) does not match its __init__ ({error}): take these arguments"
    for step in ("open", "read", "write"):
        if getattr(_class(method.pathway), step) is getattr(Pathway, step):
            return f"{_class(method.pathway).__name__} does not define {step}: see Pathway"
    return None


def _options_problem(options: Any) -> str | None:
    if not isinstance(options, type) or not issubclass(options, Options):
        return f"options={options!r} is not a class of options: pass a subclass of Options"
    if "__dataclass_params__" not in vars(options):
        return f"{options.__name__} is not a dataclass: decorate it with @dataclass(frozen=True)"
    try:
        documented = documentation(options)
    except (OSError, TypeError, SyntaxError):  # without source, as in an interactive session
        documented = dict.fromkeys([field.name for field in dataclasses.fields(options)], "")
    try:
        hints = typing.get_type_hints(options, include_extras=True)
    except NameError as error:
        return f"the types of {options.__name__} cannot be resolved ({error}): import them in its module"
    for field in dataclasses.fields(options):
        where = f"{options.__name__}.{field.name}"
        if field.name in (*inspect.signature(ResidualConfig).parameters, "eps"):
            return f"{where} is the name of another setting: choose a different one"
        if field.default is dataclasses.MISSING:
            return f"{where} has no default: add one, {field.name}: float = 0.0"
        if field.name not in documented:
            return f"{where} is not documented: add a line of text under it"
        try:
            convert(hints[field.name], field.default, where)
        except ConfigError as error:
            return str(error)
        except (KeyError, TypeError, ValueError):
            return f"{where} has the type {field.type}, which configs do not support: use {TYPES}"
    return None


def _class(made: Any) -> Any:
    """The class of a row's pathway or readout, or of a `functools.partial` of it."""
    return made.func if isinstance(made, partial) else made

"""The residual methods by name: each row has the streams of H_0, a block's pathway, the readout and the options."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from dualres.config.plugins import is_module_name
from dualres.config.schema import ConfigError, ResidualConfig
from dualres.config.validation import build as build_options
from dualres.config.validation import did_you_mean, suggesting
from dualres.ops import Route
from dualres.residual.attnres import AttnRes, ValueProjected, ValueProjectedOptions
from dualres.residual.dar import Dual, DualOptions
from dualres.residual.hyper_connections import HyperConnections, HyperOptions
from dualres.residual.pathway import LastState, Options, Pathway, Place
from dualres.residual.retrieval import RetrievalOptions, RetrievalReadout
from dualres.residual.route import CROSS_V, DUAL, FIXED_KV, SELF_KV, SINGLE, VALUE_PROJECTED
from dualres.residual.standard import Standard
from dualres.util.errors import ModelError


class Method(NamedTuple):
    """One row: `pathway(dim, place, eps=, **options)` builds a block's pathway, `readout(dim, eps=)` the readout."""

    streams: int | None  # J, copies of the embedding in H_0; None: the option `streams`
    pathway: Callable[..., Pathway]
    readout: Callable[..., nn.Module]
    branches_per_block: int | None  # S; None: the config's `default_branches_per_block`
    options: type[Options] = Options


_attnres = partial(
    Method, streams=1, pathway=AttnRes, readout=partial(RetrievalReadout, route=SINGLE), options=RetrievalOptions
)


def _dar(route: Route, branches_per_block: int | None) -> Method:
    return Method(
        streams=2,
        pathway=partial(Dual, route=route),
        readout=partial(RetrievalReadout, route=route),
        branches_per_block=branches_per_block,
        options=DualOptions,
    )


METHODS: dict[str, Method] = {
    "standard": Method(streams=1, pathway=Standard, readout=LastState, branches_per_block=2),
    "mhc": Method(
        streams=None, pathway=HyperConnections, readout=LastState, branches_per_block=2, options=HyperOptions
    ),
    "attnres-block": _attnres(branches_per_block=None),
    "attnres-full": _attnres(branches_per_block=1),
    "attnres-vproj": Method(
        streams=2,
        pathway=ValueProjected,
        readout=partial(RetrievalReadout, route=VALUE_PROJECTED),
        branches_per_block=1,
        options=ValueProjectedOptions,
    ),
    "dar-block": _dar(DUAL, branches_per_block=None),
    "dar-full": _dar(DUAL, branches_per_block=2),
    "dar-selfkv": _dar(SELF_KV, branches_per_block=2),
    "dar-fixedkv": _dar(FIXED_KV, branches_per_block=2),
    "dar-crossv": _dar(CROSS_V, branches_per_block=2),
}

DEFAULT_BRANCHES_PER_BLOCK = 4  # without a scale: K = 2 layers, as in the paper's dense models


class Residual(NamedTuple):
    """The residual part of a network: all but its embedding, branches and output."""

    streams: int  # J
    places: list[Place]  # one per block
    pathways: list[Pathway]  # one per block
    readout: nn.Module


def method(name: str) -> Method:
    if name not in METHODS:
        remedy = f"use one of {', '.join(METHODS)}, or register it (--plugin MODULE, dualres.register_method)"
        raise ConfigError(suggesting(f"residual.method={name!r} is unknown: {remedy}", name, METHODS))
    return METHODS[name]


def check_known(name: str, plugin: object, where: object) -> None:
    """Raise for a run or model with a method that only its plugin knows, and name the plugin, as recorded there.

    It is not imported here: code must not run because data names it.
    """
    if name not in METHODS and plugin is not None:
        module = plugin if is_module_name(plugin) and plugin != "__main__" else "MODULE"
        raise ModelError(
            f"{where} uses the residual method {name} of the plugin {plugin!r}, which is not loaded: add "
            f"--plugin {module} if you trust that module, or import it first"
        )


def resolve(config: ResidualConfig) -> dict[str, Any]:
    """The validated options of the configured method, with defaults for those that are not set."""
    options = method(config.method).options
    known = [field.name for field in dataclasses.fields(options)]
    for name, value in config.options:
        if name not in known:
            remedy = did_you_mean(name, [*known, "branches_per_block"], "residual.") or "remove it"
            valid = f"its options: {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"residual.{name}={value!r} is not an option of {config.method} ({valid}): {remedy}")
    return dict(vars(build_options(options, dict(config.options), "residual.")))


def branches_per_block(config: ResidualConfig) -> int:
    """S: from the config if set, else the method's own, else the default."""
    default = config.default_branches_per_block or DEFAULT_BRANCHES_PER_BLOCK
    return config.branches_per_block or method(config.method).branches_per_block or default


def explicit(config: ResidualConfig, branches: int) -> ResidualConfig:
    """The same config with every option set, so that it does not change when a default does."""
    size = min(branches_per_block(config), branches)
    return ResidualConfig(config.method, branches_per_block=size, **resolve(config))


def places(branches: int, config: ResidualConfig) -> list[Place]:
    """Split `branches` branches into blocks of S; the last is shorter if S does not divide them."""
    if branches < 1:
        raise ConfigError("branches is empty: pass at least one")
    if config.branches_per_block is not None and config.branches_per_block > branches:
        raise ConfigError(
            f"residual.branches_per_block={config.branches_per_block} exceeds the network's {branches} branches: "
            f"use at most {branches}"
        )
    size = min(branches_per_block(config), branches)
    shared = resolve(config).get("share_parameters")  # two sets: the two kinds of branches alternate
    lengths = [min(size, branches - start) for start in range(0, branches, size)]
    return [Place(b + 1, tuple(i % 2 if shared else i for i in range(n))) for b, n in enumerate(lengths)]


def build(dim: int, branches: int, config: ResidualConfig, eps: float = 1e-6) -> Residual:
    """The pathways and the readout of a network of `branches` branches of width `dim`."""
    row, options, blocks = method(config.method), resolve(config), places(branches, config)
    streams = row.streams or options["streams"]
    options.pop("share_parameters", None)
    try:
        pathways = [row.pathway(dim, place, eps=eps, **options) for place in blocks]
    except ValueError as error:
        size = branches_per_block(config)
        split = f"{branches} branches in {len(blocks)} blocks by residual.branches_per_block={size}"
        raise ConfigError(f"residual.method={config.method} ({split}): {error}") from None
    return Residual(streams, blocks, pathways, row.readout(dim, eps=eps))

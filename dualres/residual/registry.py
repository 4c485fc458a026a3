"""The residual methods by name: a row says how the embedding becomes H_0, a block's pathway, and the readout."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, cast

from torch import nn

from dualres.config.schema import ConfigError, ResidualConfig
from dualres.residual.attnres import AttnRes, ValueProjected
from dualres.residual.dual import Dual
from dualres.residual.hyper_connections import HyperConnections
from dualres.residual.pathway import LastState, Pathway, Place
from dualres.residual.retrieval import Retrieval
from dualres.residual.route import CROSS_V, DUAL, FIXED_KV, SELF_KV, SINGLE, VALUE_PROJECTED, Route
from dualres.residual.standard import Standard


class Method(NamedTuple):
    """One row. `pathway(dim, place, eps=, **options)` makes a block's pathway, `readout(dim, eps=)` the readout."""

    streams: int | None  # J, copies of the embedding in H_0; None: the option `streams`
    pathway: Callable[..., Pathway]
    readout: Callable[..., nn.Module]
    branches_per_block: int | None  # S; None for a block form: the scale's
    options: Mapping[str, object]  # what the method takes, with its default


def _last_state(dim: int, *, eps: float) -> nn.Module:
    return LastState()


def _dar(route: Route, branches_per_block: int | None) -> Method:
    options = {"share_parameters": True, "gate_scale": 1.0, "rho_bias": 2.0}
    return Method(2, partial(Dual, route=route), partial(Retrieval, route=route), branches_per_block, options)


_attnres_readout = partial(Retrieval, route=SINGLE)
_vproj_readout = partial(Retrieval, route=VALUE_PROJECTED)

METHODS: dict[str, Method] = {
    "standard": Method(1, Standard, _last_state, 2, {}),
    "mhc": Method(None, HyperConnections, _last_state, 2, {"streams": 4, "gate_scale": 0.01, "sinkhorn_steps": 20}),
    "attnres-block": Method(1, AttnRes, _attnres_readout, None, {"share_parameters": True}),
    "attnres-full": Method(1, AttnRes, _attnres_readout, 1, {"share_parameters": True}),
    "attnres-vproj": Method(2, ValueProjected, _vproj_readout, 1, {"share_parameters": True, "value_rank": 0}),
    "dar-block": _dar(DUAL, None),
    "dar-full": _dar(DUAL, 2),
    "dar-selfkv": _dar(SELF_KV, 2),
    "dar-fixedkv": _dar(FIXED_KV, 2),
    "dar-crossv": _dar(CROSS_V, 2),
}


DEFAULT_BRANCHES_PER_BLOCK = 4  # of a block form without a scale: K = 2, as in the paper's dense models


class Residual(NamedTuple):
    """The residual side of one network: everything but its branches."""

    streams: int  # J
    places: list[Place]  # one per block
    pathways: list[Pathway]  # one per block
    readout: nn.Module


def method(name: str) -> Method:
    """The row called `name`, or an error that lists the names there are."""
    if name not in METHODS:
        raise ConfigError(f"residual.method={name!r} is unknown: use one of {', '.join(METHODS)}")
    return METHODS[name]


def resolve(config: ResidualConfig) -> dict[str, object]:
    """The options of the configured method, defaults filled in; an option that the method does not have is refused."""
    row = method(config.method)
    given = config.options()
    foreign = sorted(given.keys() - row.options.keys())
    if foreign:
        known = ", ".join(row.options) or "none"
        raise ConfigError(
            f"residual.{foreign[0]}={given[foreign[0]]!r} is not an option of {config.method} (it has: {known}): "
            f"remove it or choose a method that has it"
        )
    return {**row.options, **given}


def branches_per_block(config: ResidualConfig) -> int:
    """S: the config's, or the method's own."""
    return config.branches_per_block or method(config.method).branches_per_block or DEFAULT_BRANCHES_PER_BLOCK


def settled(config: ResidualConfig, branches: int) -> ResidualConfig:
    """The same method with every option written out, so that it stays what it is when a default changes."""
    size = min(branches_per_block(config), branches)
    return ResidualConfig(**{**resolve(config), "method": config.method, "branches_per_block": size})  # type: ignore[arg-type]


def places(branches: int, config: ResidualConfig) -> list[Place]:
    """Cut `branches` branches into blocks of S; the last is shorter when S does not divide them."""
    size = branches_per_block(config)
    if branches < 1:
        raise ConfigError("there are no branches: give at least one")
    if config.branches_per_block is None:
        size = min(size, branches)
    if size > branches:
        raise ConfigError(
            f"residual.branches_per_block={size} is more than the {branches} branches there are: use at most {branches}"
        )
    shared = resolve(config).get("share_parameters")  # two sets: branches alternate, so each serves one kind
    lengths = [min(size, branches - start) for start in range(0, branches, size)]
    return [Place(b + 1, tuple(i % 2 if shared else i for i in range(n))) for b, n in enumerate(lengths)]


def build(dim: int, branches: int, config: ResidualConfig, eps: float = 1e-6) -> Residual:
    """The pathways and the readout of a network of `branches` branches of width `dim`."""
    row, options, blocks = method(config.method), resolve(config), places(branches, config)
    streams = row.streams or cast(int, options["streams"])
    options.pop("share_parameters", None)
    try:
        pathways = [row.pathway(dim, place, eps=eps, **options) for place in blocks]
    except ValueError as error:
        cut = f"{branches} branches in {len(blocks)} blocks by residual.branches_per_block={branches_per_block(config)}"
        raise ConfigError(f"residual.method={config.method} ({cut}): {error}") from None
    return Residual(streams, blocks, pathways, row.readout(dim, eps=eps))

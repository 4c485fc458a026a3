"""Methods of your own: known by name like ours, and refused where they would fail later."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import pytest
import torch
from torch import Tensor, nn

import dualres
from dualres.config.loading import load_config, names
from dualres.config.plugins import REGISTERED
from dualres.residual import Bounds, LastState, Method, Options, Pathway, Place, register_method, registry
from dualres.residual.dar import Dual, DualOptions
from dualres.residual.retrieval import RetrievalReadout
from dualres.residual.route import DUAL
from dualres.residual.standard import Standard
from tests.plugin import forgotten_afterwards


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    with forgotten_afterwards():
        yield


@dataclass(frozen=True)
class ScaledOptions(Options):
    """One of every type that configs support."""

    factor: float = 0.5
    """of every branch output"""
    streams: Annotated[int, Bounds(minimum=1)] = 1
    """copies of the stream"""
    kind: Literal["soft", "hard"] = "soft"
    """unused"""
    pair: tuple[float, float] = (0.0, 1.0)
    """unused"""


class Scaled(Standard):
    """h ← h + factor · u"""

    def __init__(self, dim: int, place: Place, *, eps: float, factor: float, streams: int, kind: str, pair: Any):
        super().__init__(dim, place, eps=eps)
        self.factor = factor

    def write(self, state: Any, i: int, update: Tensor) -> Any:
        return super().write(state, i, self.factor * update)


ROW = Method(streams=None, pathway=Scaled, readout=LastState, branches_per_block=None, options=ScaledOptions)


def test_a_registered_method_is_used_by_name():
    dualres.register_method("scaled", ROW)
    x, branch = torch.randn(2, 3, 4), nn.Linear(4, 4)
    config = dualres.ResidualConfig("scaled", factor=0.25)
    assert torch.allclose(dualres.residual_stack([branch], 4, config)(x), x + 0.25 * branch(x), atol=1e-6)
    assert dualres.residual_stack([branch], 4, dualres.ResidualConfig("scaled", streams=3)).streams == 3
    assert torch.allclose(dualres.residual_stack([branch], 4, "scaled")(x), x + 0.5 * branch(x), atol=1e-6)
    assert "scaled" in names("residual")
    assert "scaled" not in names("scale")
    loaded = load_config("nano", "scaled", ["residual.kind=hard"]).residual  # without a YAML file
    assert (loaded.method, dict(loaded.options)) == ("scaled", {"kind": "hard"})
    assert registry.branches_per_block(loaded) == 4  # the scale's
    with pytest.raises(dualres.ConfigError, match=r"no residual 'scald': did you mean scaled\?"):
        load_config("nano", "scald")
    with pytest.raises(dualres.ConfigError, match=r"'scald' is unknown: .*; did you mean scaled\?"):
        dualres.residual_stack([branch], 4, "scald")
    with pytest.raises(dualres.ConfigError, match=r"residual\.fator=1 is not an option of scaled"):
        registry.resolve(dualres.ResidualConfig("scaled", fator=1))
    with pytest.raises(dualres.ConfigError, match=r"residual\.streams=0 is out of range"):
        registry.resolve(dualres.ResidualConfig("scaled", streams=0))


def test_rows_like_ours_are_accepted():
    for name, row in [*registry.METHODS.items()]:
        register_method(f"my-{name}", row)
        assert REGISTERED[f"my-{name}"] == __name__


NAMES = ["", "Mine", "my method", "a,b", "a/b", "a=b", "-a", "a--b", "mine.yaml", "a\n", 3, None]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_are_refused(name: Any):
    with pytest.raises(dualres.ConfigError, match="is not valid: use lowercase letters"):
        register_method(name, ROW)


@pytest.mark.parametrize("name", ["dar-block", "mhc-4", "mhc"])  # a method, a config, both
def test_a_name_that_comes_with_dualres(name: str):
    with pytest.raises(dualres.ConfigError, match=r"exists already \(it comes with dualres\)"):
        register_method(name, ROW)


def test_a_name_that_is_registered():
    """By another module; the same one replaces its row, as a notebook cell does that runs again."""
    register_method("scaled", ROW)
    register_method("scaled", ROW._replace(branches_per_block=6))
    assert registry.METHODS["scaled"].branches_per_block == 6
    other = {"__name__": "another_module", "register_method": register_method, "ROW": ROW}
    with pytest.raises(dualres.ConfigError, match=r"exists already \(registered by tests.residual.test_registration\)"):
        exec('register_method("scaled", ROW)', other)


class Plain:
    pass


class Unwritten(Standard):
    write = Pathway.write


@dataclass(frozen=True)
class Foreign:
    factor: float = 0.5
    """documented"""


class Undecorated(Options):
    factor: float = 0.5
    """documented"""


@dataclass(frozen=True)
class Undocumented(Options):
    factor: float = 0.5
    other: float = 0.5
    """documented"""


@dataclass(frozen=True)
class Required(Options):
    factor: float
    """documented"""


@dataclass(frozen=True)
class Untyped(Options):
    factor: complex = 1j
    """documented"""


@dataclass(frozen=True)
class OutOfRange(Options):
    factor: Annotated[float, Bounds(minimum=1)] = 0.5
    """documented"""


@dataclass(frozen=True)
class Taken(Options):
    branches_per_block: int = 2
    """documented"""


BUILT = Standard(4, Place(1, (0, 1)), eps=1e-6)
PLAIN = {"streams": 1, "pathway": Standard, "readout": LastState, "branches_per_block": 2}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"pathway": Plain}, r"pathway=.*Plain.* is not a Pathway: pass a subclass"),
        ({"pathway": nn.Linear}, r"pathway=.*Linear.* is not a Pathway"),
        ({"pathway": BUILT}, r"pathway=Standard\(\) is not a Pathway: pass a subclass"),
        ({"pathway": partial(nn.Linear, 3)}, "is not a Pathway"),
        ({"pathway": Unwritten}, "Unwritten does not define write"),
        ({"pathway": Scaled}, r"Scaled\(dim, place, eps=\) does not match its __init__ \(missing a required"),
        ({"options": ScaledOptions}, r"Standard\(dim, place, eps=, factor=, .*\) does not match .*unexpected keyword"),
        ({"pathway": Dual, "options": DualOptions, "readout": RetrievalReadout}, r"RetrievalReadout\(dim, eps=\)"),
        ({"readout": Plain}, "readout=.*Plain.* is not a Module"),
        ({"streams": 0}, "streams=0 is not a positive number"),
        ({"streams": 1.5}, "streams=1.5 is not a positive number"),
        ({"streams": None}, r"streams=None leaves it to an option that Options does not have"),
        ({"branches_per_block": 0}, "branches_per_block=0 is not a positive number"),
        ({"options": {"factor": 1}}, "is not a class of options: pass a subclass of Options"),
        ({"options": Foreign}, "Foreign.* is not a class of options: pass a subclass of Options"),
        ({"options": Undecorated}, r"Undecorated is not a dataclass: decorate it with @dataclass\(frozen=True\)"),
        ({"options": Undocumented}, r"Undocumented\.factor is not documented"),
        ({"options": Required}, r"Required\.factor has no default"),
        ({"options": Untyped}, r"Untyped\.factor has the type .*complex.*, which configs do not support: use bool"),
        ({"options": OutOfRange}, r"OutOfRange\.factor=0.5 is out of range"),
        ({"options": Taken}, r"Taken\.branches_per_block is the name of another setting"),
    ],
    ids=lambda value: None if isinstance(value, str) else ", ".join(f"{k}={v!r}"[:40] for k, v in value.items()),
)
def test_rows_that_are_refused(row: dict[str, Any], says: str):
    with pytest.raises(dualres.ConfigError, match=f"the method 'mine' cannot be registered: .*{says}"):
        register_method("mine", Method(**{**PLAIN, **row}))
    assert "mine" not in registry.METHODS
    assert "mine" not in names("residual")


def test_what_is_not_a_row():
    with pytest.raises(dualres.ConfigError, match=r"is not a row: pass a Method\("):
        register_method("mine", Standard)  # type: ignore[arg-type]


def test_a_readout_with_its_route():
    readout = partial(RetrievalReadout, route=DUAL)
    row = Method(streams=2, pathway=Dual, readout=readout, branches_per_block=2, options=DualOptions)
    register_method("mine", row)
    assert registry.METHODS["mine"] is row

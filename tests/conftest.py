import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: there may be no GPU
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the commands that tests start: two test processes share two cores

import pytest
import torch

from dualres.util.amx import avoid_hidden_tiles

avoid_hidden_tiles()
torch.set_num_threads(1)  # as for the commands


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """A test that draws without a generator of its own draws the same numbers in any order and on any machine."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tier the rows of a product that is marked `axes(parameter=base, …)`: one row per stressed axis is enough.

    A row that differs from the base in at most one parameter keeps its tier, any other is exhaustive. A row of the
    Triton interpreter, kind="triton", may differ in one more: then it is slow.
    """
    for item in items:
        marker = item.get_closest_marker("axes")
        if marker is None:
            continue
        parameters = item.callspec.params  # type: ignore[attr-defined]
        differing = [name for name, base in marker.kwargs.items() if parameters[name] != base]
        if len(differing) == 2 and parameters.get("kind") == "triton":
            item.add_marker(pytest.mark.slow)
        elif len(differing) > 1:
            item.add_marker(pytest.mark.exhaustive)

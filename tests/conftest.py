import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: there may be no GPU

import pytest
import torch

from dualres.util.amx import avoid_hidden_tiles

avoid_hidden_tiles()
torch.set_num_threads(1)  # two test processes share two cores


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    """A test that draws without a generator of its own draws the same numbers in any order and on any machine."""
    torch.manual_seed(0)

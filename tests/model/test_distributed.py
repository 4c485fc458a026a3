"""DDP and FSDP2 on two processes compute what one process computes on the whole batch."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launching import assert_nothing_wrong
from tests.model.distributed_worker import GROUPS, RANKS

TIMEOUT = 900  # seconds; a collective that never ends gives up after 300
VIEWS = "error:FSDP2-wrapped module"  # it warns of a block that returns a view, which hides its backward hook


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this PyTorch was built without gloo")
@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=() if g == "one of each" else pytest.mark.slow, id=g) for g in GROUPS]
)
def test_two_processes_equal_one(group: str, tmp_path: Path):
    """All cases of a group in one launch, hence in one test: a launch costs more than ten cases."""
    worker = ["-W", VIEWS, "-m", "tests.model.distributed_worker"]
    commands = [[*worker, str(rank), str(tmp_path), group] for rank in range(RANKS)]
    assert_nothing_wrong(commands, tmp_path, TIMEOUT, GROUPS[group])

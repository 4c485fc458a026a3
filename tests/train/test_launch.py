"""The one printer of launch commands."""

import pytest

from dualres.train.launch import launch_command

SEVERAL = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "


@pytest.mark.parametrize(
    ("processes", "node_size", "start"),
    [
        (1, 8, "dualres"),
        (8, 8, "torchrun --nproc-per-node 8 -m dualres"),
        (16, 8, f"torchrun {SEVERAL}--nproc-per-node 8 -m dualres"),
        (12, 8, "torchrun --nproc-per-node 12 -m dualres"),  # no whole machines of eight: one larger machine
        (8, 4, f"torchrun {SEVERAL}--nproc-per-node 4 -m dualres"),
    ],
)
def test_processes_over_machines(processes: int, node_size: int, start: str):
    command = launch_command("nano", "mhc-2", processes=processes, node_size=node_size)
    assert command == f"{start} train nano mhc-2"


def test_options_and_overrides_are_quoted_for_a_shell():
    command = launch_command("nano", "mhc-2", ["train.dataset='a b'"], {"data": "my data", "out": None, "plugin": []})
    assert command == """dualres train nano mhc-2 --data 'my data' --set 'train.dataset='"'"'a b'"'"''"""


def test_an_option_may_be_repeated():
    command = launch_command("nano", "mine", ["a=1"], {"plugin": ["first", "second"]}, processes=2)
    start = "torchrun --nproc-per-node 2 -m dualres train nano mine"
    assert command == f"{start} --plugin first --plugin second --set a=1"

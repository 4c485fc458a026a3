"""Devices by name, and their memory."""

import os
from pathlib import Path

import pytest
import torch

from dualres.cli import main, make_parser
from dualres.config.schema import ConfigError
from dualres.train import device as devices
from dualres.train.device import free_memory, pick_device, total_memory

CPU = torch.device("cpu")
MEMINFO = "MemTotal:       100 kB\nMemFree:        5 kB\nMemAvailable:   60 kB\nHugePages_Total:       0\n"
MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(
    ("gpus", "name", "device"),
    [
        (0, "auto", "cpu"),
        (0, "cpu", "cpu"),
        (2, "auto", "cuda"),
        (2, "cpu", "cpu"),
        (2, "cuda", "cuda"),
        (2, "cuda:1", "cuda:1"),
    ],
)
def test_a_device(gpus: int, name: str, device: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert pick_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("gpus", "name", "says"),
    [
        (0, "cuda", "--device cuda: this machine has no GPU that PyTorch can use; use --device cpu"),
        (0, "cuda:0", "--device cuda:0: this machine has no GPU"),
        (1, "cuda:7", "--device cuda:7: this machine has 1 GPU; use cuda:0"),
        (2, "cuda:2", "--device cuda:2: this machine has 2 GPUs; use cuda:0 to cuda:1"),
        *((2, name, f"--device {name} is not a device") for name in ("gpu", "cuda:", "cuda:one", "mps", "meta")),
    ],
)
def test_no_such_device(gpus: int, name: str, says: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ConfigError, match=says):
        pick_device(name)


WITH_DEVICE = [name for name, parser in make_parser()[1].items() if "--device" in parser._option_string_actions]


@pytest.mark.parametrize("command", WITH_DEVICE)
def test_every_command_refuses_a_missing_gpu_before_anything_else(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Before it notices that the scale, the model and the data do not exist, or that nothing is to be measured."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    names = ["nowhere", "standard"] if command == "train" else ["nowhere"]
    assert main([command, *names, "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("dualres: --device cuda: this machine has no GPU that PyTorch can use;")
    assert list(tmp_path.iterdir()) == []


def test_the_commands_with_a_device():
    assert set(WITH_DEVICE) >= {"train", "suite", "evaluate", "analyze"}


@pytest.mark.parametrize(
    ("limit", "free", "total"),
    [
        ("20480", 20480 - 10240 + 2048, 20480),
        ("max", 60 * 1024, MACHINE),
        ("9223372036854771712", 60 * 1024, MACHINE),
        (None, 60 * 1024, MACHINE),
    ],
)
def test_memory_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, free: int, total: int):
    """The machine's, or what is left of a container's limit; its cache of files is given back."""
    (tmp_path / "meminfo").write_text(MEMINFO)
    group = [tmp_path / name for name in ("memory.max", "memory.current", "memory.stat")]
    if limit:
        group[0].write_text(f"{limit}\n")
        group[1].write_text("10240\n")
        group[2].write_text("anon 8192\ninactive_file 2048\n")
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert (free_memory(CPU), total_memory(CPU)) == (free, total)


def test_memory_where_nothing_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert free_memory(CPU) == total_memory(CPU) == MACHINE

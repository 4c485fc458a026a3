"""Meshes are refused with the numbers and a remedy, before any process group starts."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dualres.config.schema import AnalyzeConfig, Config, ConfigError, ParallelConfig
from dualres.parallel.mesh import Mesh, chunk_sizes, mesh_of
from dualres.parallel.pipeline import padded_micro_batches
from tests.parallel.cases import Case, config_of
from tests.train.tiny import ROOT, overrides


def config(feedforward: str = "moe", model: Any = None, **parallel: Any) -> Config:
    made = config_of(Case("dar-block", feedforward, 1, tuple((model or {}).items())), Mesh(), layers=7)
    return dataclasses.replace(
        made, train=dataclasses.replace(made.train, engine="fsdp2", parallel=ParallelConfig(**parallel))
    )


TENSOR: dict[str, Any] = {"tensor": 2, "sequence_parallel": True}
REFUSED = {
    "processes": (
        config(**TENSOR, pipeline=2),
        6,
        r"tensor=2 × pipeline=2 = 4 does not divide 6 processes: start 4 or 8",
    ),
    "expert": (
        config(expert=4),
        6,
        r"expert=4 does not divide the 6 data-parallel ranks of 6 processes .* use expert 1 or 2, or 4 processes",
    ),
    "experts": (
        config(expert=8, **TENSOR),
        16,
        r"moe.experts=8 is not divisible by .*expert=8 × tensor=2 = 16 ranks.*use expert 1, 2 or 4",
    ),
    "chunks": (
        config(pipeline=5),
        5,
        r"pipeline=5 × virtual_stages=1 = 5 chunks exceed the 4 blocks of dar-block",
    ),
    "virtual": (config(virtual_stages=2), 4, r"virtual_stages=2 needs a pipeline"),
    "interleaved": (config(pipeline=2, virtual_stages=3), 2, r"= 6 chunks exceed the 4 blocks"),
    "sequence": (
        config(tensor=2),
        2,
        r"tensor=2 with sequence_parallel=false .* set train.parallel.sequence_parallel=true",
    ),
    "context": (config(context=2), 2, r"context=2: context parallelism is not implemented"),
    "length": (
        config("dense", {"context": 9}, **TENSOR),
        2,
        r"tensor=2 does not divide model.context=9: use 1",
    ),
    "vocabulary": (
        config("dense", {"vocab_size": 37}, **TENSOR),
        6,
        r"vocab_size=37 is not divisible by train.parallel.tensor=2, and its width 16 not by the 3 data-.*size=38",
    ),
    "width": (
        config("dense", {"ffn_width": 25}, **TENSOR),
        2,
        r"tensor=2 does not divide model.ffn_width=25: use 1",
    ),
}


@pytest.mark.parametrize(("made", "processes", "message"), REFUSED.values(), ids=REFUSED)
def test_impossible_meshes(made: Config, processes: int, message: str):
    with pytest.raises(ConfigError, match=message):
        mesh_of(made, processes)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tensor", 4, r"tensor=4 does not divide model.kv_heads=2: use 1 or 2"),
        ("expert", 3, r"expert=3 does not divide model.moe.experts=8: use 1, 2, 4 or 8"),
        ("pipeline", 8, r"pipeline=8 exceeds model.layers=7"),
        ("virtual_stages", 0, r"virtual_stages=0 is out of range"),
    ],
)
def test_the_config_refuses_what_no_number_of_processes_makes_possible(name: str, value: int, message: str):
    with pytest.raises(ConfigError, match=message):
        config("moe", **{name: value})


def test_looks_inside_need_a_whole_stack():
    made = dataclasses.replace(config(pipeline=2), analyze=AnalyzeConfig(every=5))
    with pytest.raises(ConfigError, match=r"analyze.every=5 needs .* whole model, which pp2 shards"):
        mesh_of(made, 2)
    assert mesh_of(dataclasses.replace(config(), analyze=AnalyzeConfig(every=5)), 2) == Mesh(data=2)


@pytest.mark.parametrize(
    ("made", "processes", "described"),
    [
        (config(), 4, "dp4"),
        (config(expert=2, **TENSOR), 8, "dp4·tp2/ep2"),
        (config(pipeline=2, virtual_stages=2), 4, "dp2·pp2×2"),
        (config(pipeline=2, **TENSOR), 4, "tp2·pp2"),
        (config("dense"), 1, "dp1"),
    ],
)
def test_possible_meshes(made: Config, processes: int, described: str):
    mesh = mesh_of(made, processes)
    assert mesh.describe() == described
    assert mesh.processes == processes
    assert mesh.rest * mesh.expert == mesh.data
    assert sum(chunk_sizes(made, mesh)) == 4


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_every_number_of_micro_batches_has_a_schedule(ranks: int, virtual: int):
    """PyTorch's interleaved schedule wants whole rounds, 1F1B a micro-batch for each rank."""
    for count in range(1, 40):
        run = padded_micro_batches(count, ranks, virtual)
        assert count <= run < count + 2 * ranks
        assert run >= ranks if virtual == 1 else run % max(1, run // ranks) == 0


def test_the_command_refuses_before_any_process_group_starts(tmp_path: Path):
    """With the environment that torchrun makes for six processes, of which no other exists: it would wait for ever."""
    made = overrides("moe", train__parallel__tensor=2, train__parallel__pipeline=2, model__kv_heads=2)
    command = [sys.executable, "-m", "dualres", "train", "nano-moe", "dar-block", "--out", str(tmp_path / "run")]
    for override in [*made, "train.parallel.sequence_parallel=true"]:
        command += ["--set", override]
    waiting = {"RANK": "0", "WORLD_SIZE": "6", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **waiting}, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 2
    assert re.search(r"tensor=2 × pipeline=2 = 4 does not divide 6 processes", done.stderr)
    assert not (tmp_path / "run").exists()

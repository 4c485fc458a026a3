"""Which runs belong together, and how they are called."""

from pathlib import Path
from typing import Any

import pytest

from dualres.report.runs import Group, find_runs, group_runs
from tests.report.reading import copy_run, describe

TINY = "2×32"


def groups(*folders: Path) -> list[Group]:
    return group_runs(find_runs(folders))[0]


def methods(*folders: Path) -> list[str]:
    return [group.method for group in groups(*folders)]


def test_seeds_are_one_group_and_standard_is_first(suite: Path):
    found = groups(suite)
    assert [(group.scale, group.method, [run.seed for run in group.runs]) for group in found] == [
        *((TINY, "standard", [0, 1]), (TINY, "dar-block", [0, 1]), (TINY, "mhc-2", [0]))
    ]
    assert all(group.setting == found[0].setting and group.within == "" for group in found)


@pytest.mark.parametrize(
    "change",
    [
        {"train__micro_batch": 4},
        {"train__checkpoint_every": 1},
        {"train__engine": "single"},
        {"train__parallel__zero_stage": 1},
        {"residual__rho_bias": 2.0},  # the default, written out
        {"residual__share_parameters": True},
    ],
    ids=str,
)
def test_what_changes_no_result_makes_no_group(suite: Path, tmp_path: Path, change: dict[str, Any]):
    other = copy_run(suite / "dar-block-seed1", tmp_path / "other", **change)
    assert [len(group.runs) for group in groups(suite / "dar-block-seed0", other)] == [2]


def test_the_micro_batch_of_routers_does(sparse: Path, tmp_path: Path):
    other = copy_run(sparse, tmp_path / "other", train__micro_batch=4)
    assert methods(sparse, other) == ["dar-block, micro_batch=2", "dar-block, micro_batch=4"]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"train__learning_rate": 0.004}, ("learning_rate=0.003", "learning_rate=0.004")),
        ({"residual__branches_per_block": 2}, ("branches_per_block=4", "branches_per_block=2")),
        ({"residual__share_parameters": False}, ("share_parameters=true", "share_parameters=false")),
        ({"train__clip": 2, "residual__rho_bias": 0}, ("rho_bias=2.0, clip=1.0", "rho_bias=0.0, clip=2.0")),
    ],
    ids=str,
)
def test_what_differs_is_in_the_name(suite: Path, tmp_path: Path, change: dict[str, Any], names: tuple[str, str]):
    other = copy_run(suite / "dar-block-seed0", tmp_path / "other", **change)
    assert methods(suite / "dar-block-seed0", other) == [f"dar-block, {name}" for name in names]
    assert methods(other) == ["dar-block"]  # alone it needs no more


def test_settings_of_one_scale_are_told_apart(suite: Path, tmp_path: Path):
    other = copy_run(suite / "standard-seed0", tmp_path / "other", train__tokens=999_936)
    found = groups(suite / "standard-seed0", suite / "mhc-2-seed0", other)
    assert [group.heading for group in found] == [
        f"{TINY}, tokens=3072",
        f"{TINY}, tokens=999936",
        f"{TINY}, tokens=3072",
    ]
    assert found[0].setting == found[2].setting != found[1].setting


def test_other_data_are_another_setting(suite: Path, tmp_path: Path):
    moved, other = (copy_run(suite / "standard-seed1", tmp_path / name) for name in ("moved", "other"))
    first = find_runs([suite / "standard-seed0"])[0]
    describe(moved, data={"folder": "elsewhere/mine", "content": first.content})
    describe(other, data={"folder": "elsewhere/data", "content": "0123456789"})
    assert [len(group.runs) for group in groups(suite / "standard-seed0", moved)] == [2]
    names = [name.removeprefix("standard, ") for name in methods(suite / "standard-seed0", other)]
    assert names == ["data=data", 'data="data (01234567)"']


@pytest.mark.parametrize(
    ("change", "label"),
    [
        ({}, "mhc-2"),
        ({"residual__streams": 3}, "mhc-3"),
        ({"residual__streams": None}, "mhc-4"),  # the method's default
        ({"residual__streams": 4}, "mhc-4"),
        (
            {"residual__method": "attnres-vproj", "residual__streams": None, "residual__value_rank": 96},
            "attnres-vproj-96",
        ),
        ({"residual__method": "attnres-vproj", "residual__streams": None, "residual__value_rank": 0}, "attnres-vproj"),
        ({"residual__method": "attnres-vproj", "residual__streams": None, "residual__value_rank": 5}, "attnres-vproj"),
    ],
    ids=str,
)
def test_names_of_methods(suite: Path, tmp_path: Path, change: dict[str, Any], label: str):
    [group] = groups(copy_run(suite / "mhc-2-seed0", tmp_path / "run", **change))
    assert group.method == label


NANO = {"layers": 8, "width": 96, "heads": 4, "kv_heads": 2, "ffn_width": 256, "vocab_size": 4096, "context": 256}


def test_names_of_scales(suite: Path, sparse: Path, tmp_path: Path):
    nano = {f"model__{key}": value for key, value in NANO.items()}
    run = copy_run(suite / "standard-seed0", tmp_path / "nano", train__tokens=999_936, **nano)
    longer = copy_run(run, tmp_path / "longer", model__context=512)
    assert [group.scale for group in groups(run, longer, sparse)] == ["nano", "8×96", "2×32, 4 experts"]


def test_a_seed_counts_once_and_the_finished_run_does(suite: Path, tmp_path: Path):
    again = copy_run(suite / "standard-seed0", tmp_path / "again")
    unfinished = copy_run(suite / "standard-seed1", tmp_path / "unfinished")
    (unfinished / "summary.json").unlink()
    found, left = group_runs(find_runs([unfinished, suite, again]))
    assert [run.folder.name for run in found[0].runs] == ["standard-seed0", "standard-seed1"]
    assert [run.folder.name for run in left] == ["unfinished", "again"]


def test_a_run_that_began_with_a_model_is_another_setting(suite: Path, tmp_path: Path):
    other = copy_run(suite / "standard-seed0", tmp_path / "other")
    describe(other, start="llama")
    assert methods(suite / "standard-seed0", other) == ["standard, start=null", "standard, start=llama"]

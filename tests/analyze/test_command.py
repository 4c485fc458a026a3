"""`dualres analyze` as a user meets it: runs and exported folders, files, figures, bad input."""

import json
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualres.analyze import figures
from dualres.analyze.analysis import FOLDER, read_analysis
from dualres.cli import main
from dualres.hub.export import export
from dualres.train.checkpoint import complete_checkpoints
from dualres.train.run_folder import CHECKPOINTS
from tests.train.tiny import tiny_config, tiny_data, train_tiny

SHORT: dict[str, Any] = {"train__tokens": 4 * 4 * 32}
FEW = ["--sequences", "2", "--last", "8", "--retrieval-sequences", "2"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data and runs: `dar`, `mhc`, `moe`, `plain`, and `exported`, the first as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("place")
    data = tiny_data(root)
    for name, residual, kind in [
        ("dar", "dar-full", "dense"),
        ("mhc", "mhc-4", "dense"),
        ("moe", "dar-block", "moe"),
        ("plain", "standard", "dense"),
    ]:
        train_tiny(tiny_config(residual, kind, **SHORT), data, root / name)
    export(root / "dar", root / "exported")
    return root


@pytest.fixture
def here(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runs in a folder of the test's own."""
    for path in place.iterdir():
        if path.is_dir():
            shutil.copytree(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at no picture: drawing takes most of the time."""
    monkeypatch.setattr(figures, "draw_one", lambda analysis, folder: None)


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def pictures(*names: str) -> set[str]:
    return {f"{name}.{ending}" for name in names for ending in ("svg", "png")}


@pytest.mark.slow
def test_several_models(here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["analyze", "mhc", "moe", "ours=plain", "--data", "data", *FEW]) == 0
    shown = capsys.readouterr()
    lines = shown.out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["mhc", "moe", "ours"]
    both = {"analysis.json", "analysis.npz"}
    dual = pictures("cka", "rescue", "gates", "retrieval", "health")
    assert files(here / "mhc" / FOLDER) == both | pictures("cka", "rescue", "health")
    assert files(here / "moe" / FOLDER) == both | dual | pictures("experts")
    assert files(here / "plain" / FOLDER) == both | pictures("health")
    assert files(here / "analyses") == dual | pictures("experts")
    for path in here.glob("*/*.svg"):
        ElementTree.parse(path)
    for path in here.glob("*/*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    (here / "plain" / FOLDER / "health.svg").unlink()  # as after an interruption
    assert main(["analyze", "plain", "--data", "data", *FEW]) == 0
    assert files(here / "plain" / FOLDER) == both | pictures("health")

    analysis = read_analysis(here / "moe" / FOLDER)
    assert analysis is not None
    with np.load(here / "moe" / FOLDER / "analysis.npz") as packed:
        assert set(packed) == set(analysis.arrays)
        for name in packed:
            np.testing.assert_array_equal(packed[name], analysis.arrays[name])
    legend = json.loads((here / "moe" / FOLDER / "analysis.json").read_text())["legend"]
    assert set(legend) == set(analysis.arrays)
    assert analysis.arrays["router_curve"].shape == (4, 2)
    assert analysis.arrays["expert_load"].shape == (2, 4)
    assert np.isnan(analysis.arrays["retrieval"]).any()


def test_without_matplotlib_the_data_are_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """And drawn as soon as it is installed."""
    with monkeypatch.context() as bare:
        bare.setitem(sys.modules, "matplotlib", None)
        bare.delitem(sys.modules, "dualres.analyze.figures")
        assert main(["analyze", "plain", "same=plain", "--data", "data", *FEW]) == 0
    assert "needs the package matplotlib (extra plots): pip install -e '.[plots]'" in capsys.readouterr().err
    assert files(here / "plain" / FOLDER) == {"analysis.json", "analysis.npz"}
    assert not (here / "analyses").exists()
    assert main(["analyze", "plain", "--data", "data", *FEW]) == 0
    assert files(here / "plain" / FOLDER) == {"analysis.json", "analysis.npz"} | pictures("health")


@pytest.mark.usefixtures("undrawn")
def test_what_was_done_is_not_done_again(here: Path, capsys: pytest.CaptureFixture[str]):
    """With another protocol it is."""
    assert main(["analyze", "dar", "--data", "data", *FEW]) == 0
    stamp = (here / "dar" / FOLDER / "analysis.json").stat().st_mtime_ns
    assert main(["analyze", "dar", "--data", "data", *FEW]) == 0
    assert "already analyzed" in capsys.readouterr().err
    assert (here / "dar" / FOLDER / "analysis.json").stat().st_mtime_ns == stamp
    assert main(["analyze", "dar", "--data", "data", *FEW, "--length", "16"]) == 0
    assert (here / "dar" / FOLDER / "analysis.json").stat().st_mtime_ns > stamp


@pytest.mark.usefixtures("undrawn")
def test_a_run_and_its_export_are_the_same(here: Path):
    assert main(["analyze", "dar", *FEW, "--data", "data"]) == 0
    assert main(["analyze", "exported", *FEW, "--data", "data"]) == 0
    run, exported = read_analysis(here / "dar" / FOLDER), read_analysis(here / "exported" / FOLDER)
    assert run is not None
    assert exported is not None
    assert run.arrays.keys() == exported.arrays.keys()
    for name, values in run.arrays.items():
        np.testing.assert_array_equal(values, exported.arrays[name])


@pytest.mark.usefixtures("undrawn")
def test_the_data_of_a_run_are_known(here: Path, place: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["analyze", "dar", *FEW]) == 0  # trained on place/data, which is still there
    described = json.loads((here / "mhc" / "config.json").read_text())
    described["data"]["folder"] = "gone"
    (here / "mhc" / "config.json").write_text(json.dumps(described))
    assert main(["analyze", "mhc", *FEW]) == 2
    assert "no longer in gone: pass --data" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_figures_of_a_page(here: Path):
    for name in ("mhc", "moe"):
        main(["analyze", name, *FEW, "--data", "data"])
    analyses = {
        name: complete_checkpoints
        for name in ("mhc", "moe")
        if (complete_checkpoints := read_analysis(here / name / FOLDER)) is not None
    }
    drawn = figures.sections(analyses)
    panels = {section.name: [panel.method for panel in section.panels] for section in drawn}
    assert panels == {
        "cka": ["mhc", "moe"],
        "rescue": ["mhc", "moe"],
        "gates": ["moe"],
        "retrieval": ["moe"],
        "health": ["mhc", "moe"],
        "experts": ["moe"],
    }
    for section in drawn:
        for panel in section.panels:
            ElementTree.fromstring(panel.svg)
    alone = {"mhc": analyses["mhc"]}
    assert figures.sections(alone) == figures.sections(alone)  # equal bytes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--data", "data"], "nothing has no config.json: pass the folder of a run or of a saved model"),
        (
            ["dar", "nothing", "--data", "data"],
            "nothing has no config.json: pass the folder of a run or of a saved model",
        ),
        (["dar", "mhc", "--data", "data", "--out", "data/index.json"], "is a file: use a folder"),
        (["exported"], "exported is not a run: pass --data"),
        (["dar", "--data", "nothing"], "nothing"),
        (["dar", "--data", "data", "--sequences", "0"], "--sequences 0 is not positive"),
        (["dar", "--data", "data", "--length", "33"], "--length 33 exceeds the context of dar: use at most 32"),
        (["dar", "--data", "data", "--sequences", "100000"], "sequences of 32 tokens, but 100000 are needed: lower"),
        (["dar", "dar", "--data", "data"], "two models are called dar"),
        (["exported", "--data", "data", "--checkpoint", "best"], "--checkpoint does not apply"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_refused(arguments: list[str], message: str, here: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["analyze", *arguments]) in (1, 2)
    assert message in capsys.readouterr().err
    assert not list(here.glob(f"*/{FOLDER}"))


def test_other_tokens_are_refused(here: Path, capsys: pytest.CaptureFixture[str]):
    lines = [{"text": f"To be, or not to be, that is question {number}."} for number in range(400)]
    (here / "others.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["prepare", "others.jsonl", "others", "--tokenizer", "bpe:300", "--held-out", "0.5"]) == 0
    assert main(["analyze", "dar", "--data", "others", *FEW]) == 2
    assert "prepared with a different tokenizer" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_broken_weights_and_files(here: Path, capsys: pytest.CaptureFixture[str]):
    """A model of NaNs, a damaged checkpoint, a damaged analysis: each by name."""
    assert main(["analyze", "dar", "--data", "data", *FEW]) == 0
    whole = (here / "dar" / FOLDER / "analysis.json").read_text()
    (here / "dar" / FOLDER / "analysis.json").write_text("{")
    assert main(["analyze", "dar", "--data", "data", *FEW]) == 0
    assert "analysis.json cannot be read" in capsys.readouterr().err
    assert (here / "dar" / FOLDER / "analysis.json").read_text() == whole
    for path in here.glob("exported/tokenizer*"):
        path.rename(path.with_name(f"no-{path.name}"))
    assert main(["analyze", "exported", "--data", "data", *FEW]) == 2
    assert "exported has no tokenizer" in capsys.readouterr().err
    for path in here.glob("exported/no-tokenizer*"):
        path.rename(path.with_name(path.name.removeprefix("no-")))
    from safetensors.torch import load_file, save_file

    path = here / "exported" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: torch.full_like(value, torch.nan) for name, value in tensors.items()}, path, {"format": "pt"})
    assert main(["analyze", "exported", "--data", "data", *FEW]) == 2
    assert "not finite in sequence 1: check its weights" in capsys.readouterr().err
    assert not (here / "exported" / FOLDER).exists()
    [*_, last] = complete_checkpoints(here / "mhc" / CHECKPOINTS)
    file = max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    file.write_bytes(file.read_bytes()[:-7])
    assert main(["analyze", "mhc", "--data", "data", *FEW]) == 1
    assert "is damaged" in capsys.readouterr().err

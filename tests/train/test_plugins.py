"""A method of a plugin, from `--plugin` to a trained, exported and reported model; and what is said without it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dualres.cli import main
from dualres.config.plugins import REGISTERED, load_plugins
from dualres.config.schema import ConfigError
from dualres.hub.convert import Source, target
from dualres.hub.open_model import open_model
from dualres.report.reproduce import command, origin
from dualres.train.run_folder import read_config
from dualres.util.errors import ModelError
from tests.plugin import MODULE, forget, forgotten_afterwards, write_plugin
from tests.small import model_config
from tests.train.tiny import overrides, tiny_config, train_tiny

PLUGIN = ["--plugin", MODULE]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the plugin of the docs in it."""
    write_plugin(tmp_path)
    monkeypatch.chdir(tmp_path)
    with forgotten_afterwards():
        yield tmp_path


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the plugin's method."""
    folder = tmp_path_factory.mktemp("trained")
    write_plugin(folder)
    with forgotten_afterwards():
        sys.path.append(str(folder))
        load_plugins([MODULE])
        train_tiny(tiny_config("highway", train__tokens=4 * 4 * 32), data, folder / "run")
    return folder / "run"


@pytest.fixture
def run(folder: Path, trained: Path) -> Path:
    """The run, where the plugin is not imported."""
    return Path(shutil.copytree(trained, folder / "run"))


@pytest.mark.usefixtures("folder")
def test_describe(capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "nano", "highway", *PLUGIN, "--set", "residual.gate_bias=-2"]) == 0
    assert "highway: 1 stream, 2 branches per block; gate_scale 1.0, gate_bias -2.0" in capsys.readouterr().out
    assert {"highway": MODULE} == REGISTERED
    assert main(["describe", "nano", "highwy", *PLUGIN]) == 2
    assert "did you mean highway? use one of" in capsys.readouterr().err
    assert main(["describe", "nano", "highway", *PLUGIN, *PLUGIN]) == 0  # imported once


@pytest.mark.usefixtures("folder")
def test_help_lists_the_methods_of_a_plugin():
    done = subprocess.run(
        [sys.executable, "-m", "dualres", "describe", *PLUGIN, "--help"], capture_output=True, text=True, check=False
    )
    residuals = done.stdout[done.stdout.index("residuals:") :]
    assert ", highway," in residuals, done.stderr


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no residual 'highway': use one of .*or --plugin MODULE for a method of your own"),
        (["--plugin", "my_method"], "--plugin my_method: no module named my_method: run the command in its folder"),
        (["--plugin", "my_methods.other"], "no module named my_methods.other: run"),
        (["--plugin", "my_methods.py"], "is not a module: use my_methods for the file my_methods.py"),
        (["--plugin", "./my_methods.py"], "is not a module: use my_methods for the file my_methods.py"),
        (["--plugin", ""], "is not a module"),
    ],
    ids=str,
)
def test_without_the_right_plugin(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["describe", "nano", "highway", *arguments]) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_plugin_that_fails_shows_its_own_error(folder: Path):
    (folder / f"{MODULE}.py").write_text("import no_such_module_of_the_plugin\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_the_plugin"):
        main(["describe", "nano", "highway", *PLUGIN])


def test_a_run_names_its_plugin_and_does_not_import_it(run: Path, data: Path, capsys: pytest.CaptureFixture[str]):
    assert json.loads((run / "config.json").read_text())["plugin"] == MODULE
    sys.path.append(str(run.parent))  # it could be imported
    for arguments in (
        ["generate", str(run), "x"],
        ["evaluate", str(run), "--validation", str(data), "--out", str(run.parent / "evaluated")],
        ["analyze", str(run), "--sequences", "1"],
        ["report", str(run), "-o", str(run.parent / "page.html")],
        ["export", str(run), str(run.parent / "model")],
    ):
        assert main(arguments) == 2, arguments
        shown = capsys.readouterr().err
        assert f"{run} uses the residual method highway of the plugin '{MODULE}', which is not loaded" in shown
        assert f"add --plugin {MODULE} if you trust that module" in shown
    assert MODULE not in sys.modules


@pytest.mark.parametrize("recorded", ["os; rm -rf x", "__main__", 3, ["a"]], ids=str)
def test_a_recorded_name_is_not_repeated_as_an_option_unless_it_is_one(run: Path, recorded: Any):
    description = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**description, "plugin": recorded}))
    with pytest.raises(ModelError, match="add --plugin MODULE if"):
        read_config(run)


def test_commands_open_a_run_with_its_plugin(run: Path):
    assert main(["generate", str(run), "x", "--tokens", "2", *PLUGIN]) == 0
    page = run.parent / "page.html"
    assert main(["report", str(run), "-o", str(page), *PLUGIN]) == 0
    assert f"dualres report {run} --plugin {MODULE} -o {page}" in page.read_text()
    shipped = origin(read_config(run))
    assert shipped is not None
    assert shipped.residual == "highway"
    again = command(shipped, "data")
    assert again.startswith(f"dualres train nano highway --data data --plugin {MODULE} ")
    assert re.search(rf"dualres train nano highway --data \S+ --plugin {MODULE}", page.read_text())


def test_an_exported_model_needs_the_plugin(run: Path, capsys: pytest.CaptureFixture[str]):
    model, again = run.parent / "model", run.parent / "again"
    assert main(["export", str(run), str(model), *PLUGIN]) == 0
    assert not [*model.glob("*.py")]  # code of dualres could not load it
    saved = json.loads((model / "config.json").read_text())
    assert (saved["plugin"], "auto_map" in saved) == (MODULE, False)
    card = (model / "README.md").read_text()
    assert f"import {MODULE}  # registers the residual method highway" in card
    assert "trust_remote_code" not in card
    tokens = torch.arange(5)[None]
    with torch.no_grad():
        wanted = open_model(run).decoder(tokens)
        assert torch.equal(open_model(model).decoder(tokens), wanted)
    assert main(["import", str(model), str(again), *PLUGIN]) == 0
    assert json.loads((again / "config.json").read_text())["plugin"] == MODULE
    forget()
    capsys.readouterr()
    assert main(["generate", str(model), "x"]) == 2
    assert f"{model} uses the residual method highway of the plugin '{MODULE}'" in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_conversion_to_a_method_without_a_start_divisor(tmp_path: Path):
    load_plugins([MODULE])
    source = Source(tmp_path, SimpleNamespace(), model_config(), {})
    with pytest.raises(ConfigError, match="highway has no start_divisor"):
        target(source, "highway")


def test_a_suite_passes_the_plugin_to_its_runs(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch):
    commands: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]):
            commands.append(command)

        def wait(self) -> int:
            return 1

    monkeypatch.setattr("dualres.report.suite.subprocess.Popen", Process)
    sets = [word for override in overrides() for word in ("--set", override)]
    for processes in ("1", "2"):
        options = ["--residuals", "standard,highway", "--processes", processes, "--out", str(folder / processes)]
        assert main(["suite", "nano", *options, "--data", str(data), *sets, *PLUGIN]) == 1
    assert len(commands) == 4
    assert all(f"--plugin {MODULE}" in shlex.join(each) for each in commands)


@pytest.mark.usefixtures("folder")
def test_printed_commands_pass_the_plugin(capsys: pytest.CaptureFixture[str]):
    sets = [word for override in overrides() for word in ("--set", override)]
    main(["train", "nano", "highway", "--dry-run", "--gpus", "2", *sets, *PLUGIN])
    assert f"-m dualres train nano highway --plugin {MODULE} --set" in capsys.readouterr().out
    main(
        [
            "plan",
            "nano",
            "highway",
            "--gpus",
            "2",
            "--gpu-memory",
            "80",
            *sets,
            "--set",
            "train.parallel.tensor=1",
            *PLUGIN,
        ]
    )
    assert f"-m dualres train nano highway --plugin {MODULE} --set" in capsys.readouterr().out

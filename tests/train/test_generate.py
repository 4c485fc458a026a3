"""`dualres generate` and what it loads."""

import shutil
from pathlib import Path

import pytest

from dualres.cli import main
from dualres.data.shards import TOKENIZER
from dualres.data.tokenizer import byte_tokenizer, train_bpe
from dualres.hub.open_model import open_model
from dualres.model.generation import generate
from dualres.ops import dispatch
from dualres.train import run_folder


def test_byte_tokenizer_of_the_run(whole: Path):
    assert open_model(whole).tokenizer.fingerprint == byte_tokenizer().fingerprint


def test_generate_from_a_run(whole: Path, capsys: pytest.CaptureFixture[str]):
    loaded = open_model(whole)
    prompt = loaded.tokenizer.encode("def ")
    [tokens] = generate(loaded.decoder, [prompt], 12)
    assert main(["generate", str(whole), "def ", "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == loaded.tokenizer.decode([*prompt, *tokens]) + "\n"
    sampled = []
    for seed in ("1", "1", "2"):
        assert main(["generate", str(whole), "", "--tokens", "30", "--temperature", "1", "--seed", seed]) == 0
        sampled.append(capsys.readouterr().out)
    assert sampled[0] == sampled[1] != sampled[2]


@pytest.mark.parametrize(("options", "times"), [([], 1), (["-q"], 0)], ids=["normal", "quiet"])
def test_missing_kernels_are_said_once(
    options: list[str],
    times: int,
    whole: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
):
    monkeypatch.setattr(dispatch, "INSTALLED", {"cpu": False, "triton": True})
    monkeypatch.setattr(dispatch, "_noted", set())
    assert main(["generate", str(whole), "def ", "--tokens", "2", *options]) == 0
    shown = capsys.readouterr().err
    assert shown.count("numba is not installed") == shown.count("pip install -e '.[cpu]'") == shown.count("\n") == times
    assert not [warning for warning in recwarn if "numba" in str(warning.message)]


def test_generate_from_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", str(tmp_path), "x"]) == 2
    assert f"{tmp_path} has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["x", "--tokens", "-1"], "--tokens -1 is not positive"),
        (["x", "--temperature", "-1"], "--temperature -1.0: use 0 for greedy decoding, or 0.001 to 1000"),
        (["x", "--temperature", "nan"], "--temperature nan: use 0"),
        (["x", "--temperature", "1e-320"], "--temperature 1e-320: use 0"),
        (["x", "--seed", "99999999999999999999"], "--seed 99999999999999999999: use a number from 0"),
        (["a\udcff"], "the prompt is not valid UTF-8 at character 1"),
    ],
)
def test_what_cannot_be_generated(whole: Path, capsys: pytest.CaptureFixture[str], given: list[str], says: str):
    assert main(["generate", str(whole), *given]) == 2
    assert says in capsys.readouterr().err


def test_a_run_that_was_changed(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    copy = shutil.copytree(whole, tmp_path / "run")
    train_bpe(iter(["some text"]), 258).save(copy / TOKENIZER)
    assert main(["generate", str(copy), "x"]) == 1
    assert f"{copy / TOKENIZER} is not the tokenizer of this run" in capsys.readouterr().err
    (copy / run_folder.CONFIG).write_text('{"config": {}, "data": {}}')
    assert main(["generate", str(copy), "x"]) == 1
    assert f"{copy / run_folder.CONFIG}: model is missing" in capsys.readouterr().err

"""The examples run, and say what the docs say of them."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import gpt, vit

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_add_to_your_model():
    losses = [float(x) for x in re.findall(r"loss after 200 steps ([\d.]+)", run("add_to_your_model.py"))]
    assert len(losses) == 2
    assert all(loss < 3.3 for loss in losses)  # ln 32 = 3.47 is guessing


def test_ten_changed_lines():
    """Lines marked as changed, and those of `Before` that they replace."""
    text = (EXAMPLES / "add_to_your_model.py").read_text()

    def class_body(name: str) -> list[str]:
        return text.split(f"class {name}(")[1].split("\nclass ")[0].split("\ndef ")[0].splitlines()[1:]

    before, after = class_body("Before"), class_body("After")
    unmarked = [line for line in after if "# changed" not in line]
    assert text.count("# changed") <= 10
    assert not [line for line in unmarked if line.strip() and '"""' not in line and line not in before]


def losses(text: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", text)]


def run_here(example: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """In this process, which has imported torch."""
    monkeypatch.setattr(sys, "argv", [str(example.__file__), *arguments])
    example.main()


def test_gpt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_here(gpt, monkeypatch, "--steps", "15", "--recompute", "full")
    first, last = losses(capsys.readouterr().out)
    assert 4.5 < first < 5.2  # ln 128 = 4.85 is guessing
    assert last < 3.9


def test_gpt_does_not_look_at_padding_or_ahead():
    torch.manual_seed(0)
    model, (rows,) = gpt.GPT("dar-block").eval(), gpt.batches(1, size=3)
    rows[:, :4] = gpt.PADDING
    changed = rows.clone()
    changed[:, 20:] = 65
    with torch.no_grad():
        whole, ahead = model(rows[:, :30]), model(changed[:, :30])
        for name, branch in model.stack.named_modules():
            if isinstance(branch, gpt.SelfAttention):
                assert branch.dropout > 0, name
        model.embedding.weight[gpt.PADDING] += 1
        padded = model(rows[:, :30])
    assert torch.equal(whole[:, :20], ahead[:, :20])
    assert not torch.equal(whole[:, 20:], ahead[:, 20:])
    real = (rows != gpt.PADDING)[:, :30]
    assert torch.allclose(whole[real][:, 1:], padded[real][:, 1:], atol=1e-5)


def test_vit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_here(vit, monkeypatch, "--steps", "30")
    accuracy = re.search(r"accuracy ([\d.]+)%", capsys.readouterr().out)
    assert accuracy is not None
    assert float(accuracy[1]) > 50  # 12.5 is guessing


@pytest.mark.parametrize("example", [gpt, vit], ids=lambda example: example.__name__)
def test_help_shows_how_to_run(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit):
        run_here(example, monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert f"python examples/{Path(str(example.__file__)).name}" in shown
    assert "--residual" in shown


@pytest.mark.slow
def test_gpt_and_vit_as_their_docstrings_say():
    assert losses(run("gpt.py"))[-1] < 2.7
    assert float(re.findall(r"accuracy ([\d.]+)%", run("vit.py"))[0]) > 90
    assert losses(run("gpt.py", "--recompute", "full", "--compile", "--steps", "3"))[-1] < 5


@pytest.mark.slow
def test_every_method():
    text = run("every_method.py", "--batch", "1", "--rounds", "1")
    for name in ("standard", "mhc-4", "attnres-full", "dar-block", "dar-crossv"):
        assert name in text

"""Samples of text on a page: what `dualres generate` prints, within limits, and always as text."""

import shlex
import shutil
from pathlib import Path

import pytest

from dualres.cli import main
from dualres.report import samples
from dualres.train.checkpoint import MANIFEST, complete_checkpoints
from dualres.train.run_folder import CHECKPOINTS, SUMMARY
from tests.report.reading import Element, make, section

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"


def shown(page: Element) -> dict[str, str]:
    """Text or problem, by run."""
    figures = section(page, "samples").all("figure")
    return {
        figure.all("small")[0].text.split(",")[0]: (figure.all("pre") or figure.all("p"))[0].text for figure in figures
    }


def test_what_generate_would_print(suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = suite / "dar-block-seed0"
    page = make(tmp_path / "page.html", run, samples=True)
    [text] = shown(page).values()
    capsys.readouterr()
    command = section(page, "samples").all("pre")[0].text
    assert main(shlex.split(command.replace("RUN", str(run)))[1:]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert text.startswith(samples.PROMPT)
    assert len(text) > len(samples.PROMPT)


def test_they_can_be_left_out(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(samples, "_generate")
    page = make(tmp_path / "page.html", suite)
    assert not page.all("h2", id="samples")
    assert "--no-samples" in page.all("footer")[0].text


def test_one_run_of_each_method_with_weights(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The first seed, but a finished run first."""
    monkeypatch.setattr(samples, "_generate", lambda folder, changed: (folder.name, ""))
    copied = Path(shutil.copytree(suite, tmp_path / "suite"))
    (copied / "dar-block-seed0" / SUMMARY).unlink()
    shutil.rmtree(copied / "standard-seed0" / CHECKPOINTS)
    shutil.rmtree(copied / "mhc-2-seed0" / CHECKPOINTS)
    page = make(tmp_path / "all.html", suite, samples=True)
    assert list(shown(page)) == ["standard-seed0", "dar-block-seed0", "mhc-2-seed0"]
    page = make(tmp_path / "page.html", copied, samples=True)
    assert list(shown(page)) == ["standard-seed1", "dar-block-seed1"]
    page = make(tmp_path / "page.html", copied / "mhc-2-seed0", samples=True)
    assert not page.all("h2", id="samples")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("MAX_SECONDS", -1.0, "longer than -1 seconds"),
        ("MAX_PARAMETERS", 10, "more than 10 parameters"),
        ("TEMPERATURE", float("nan"), "temperature=nan"),
    ],
)
def test_limits(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: object, problem: str):
    monkeypatch.setattr(samples, name, value)
    run = shutil.copytree(suite / "standard-seed0", tmp_path / "run")
    [text] = shown(make(tmp_path / "page.html", run, samples=True)).values()
    assert text.startswith("No sample: ")
    assert problem in text


def test_a_damaged_checkpoint_is_told(suite: Path, tmp_path: Path):
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))
    [*_, last] = complete_checkpoints(run / CHECKPOINTS)
    weights = next(last.rglob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    [text] = shown(make(tmp_path / "page.html", run, samples=True)).values()
    assert "is damaged" in text


def test_a_checkpoint_is_sampled_once(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = Path(shutil.copytree(suite / "standard-seed0", tmp_path / "run"))
    opened: list[Path] = []

    def open_model(folder: Path) -> None:
        opened.append(folder)
        raise OSError("opened")

    monkeypatch.setattr(samples, "open_model", open_model)
    for _ in range(2):
        make(tmp_path / "page.html", run, samples=True)
    assert opened == [run]
    [*_, last] = complete_checkpoints(run / CHECKPOINTS)
    (last / MANIFEST).write_bytes((last / MANIFEST).read_bytes())  # as after more training
    make(tmp_path / "page.html", run, samples=True)
    assert opened == [run, run]


def test_a_sample_is_text(suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(samples, "_generate", lambda folder, changed: (EVIL, ""))
    page = make(tmp_path / "page.html", suite / "standard-seed0", samples=True)
    assert shown(page) == {"standard-seed0": EVIL}
    assert len(page.all("script")) == 3

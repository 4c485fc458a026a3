"""Runs, exported folders and back; and training on from a saved model."""

import json
import math
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dualres import cli
from dualres.config.loading import load_recipe
from dualres.config.schema import ConfigError
from dualres.data.prepare import Settings, prepare
from dualres.evaluate.evaluation import tokenizer_digest
from dualres.hub.convert import convert
from dualres.hub.export import RUN_RECORD, export, import_run, run_record
from dualres.hub.open_model import open_model, open_start
from dualres.train.loop import train
from dualres.util.errors import DataError, ModelError, TrainError
from tests.hub.family import saved_family_model
from tests.small import random_tokens, relative_error
from tests.train.tiny import ALONE, Told, overrides, tiny_config, tiny_data

TOKENS = random_tokens(2, 21, vocab_size=257)


class Made:
    """A tiny run of each kind, trained once."""

    def __init__(self, folder: Path):
        self.folder, self.data = folder, tiny_data(folder)
        for residual in ("dar-block", "standard"):
            train(tiny_config(residual, train__tokens=20 * 4 * 32), self.data, folder / residual, ALONE, Told())
        train(tiny_config("dar-block", "moe", train__tokens=4 * 4 * 32), self.data, folder / "moe", ALONE, Told())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def exported(made: Made, tmp_path: Path) -> Path:
    """A copy of the exported `dar-block`, to be damaged."""
    if not (made.folder / "exported").exists():
        export(made.folder / "dar-block", made.folder / "exported")
    return shutil.copytree(made.folder / "exported", tmp_path / "out")


@pytest.mark.parametrize("name", ["dar-block", "standard", "moe"])
def test_a_run_goes_out_and_comes_back(name: str, made: Made, tmp_path: Path):
    run, out = made.folder / name, tmp_path / "out"
    export(run, out)
    ours = open_model(run)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(out)
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS).logits, ours.decoder(TOKENS))
    text = "Grüße, 世界"
    assert transformers.AutoTokenizer.from_pretrained(out)(text)["input_ids"] == ours.tokenizer.encode(text)

    import_run(out, tmp_path / "again")
    again = open_model(tmp_path / "again")
    assert all(torch.equal(p, q) for p, q in zip(again.decoder.parameters(), ours.decoder.parameters(), strict=True))
    export(tmp_path / "again", tmp_path / "out2")
    for file in ("model.safetensors", "config.json", "tokenizer.json", RUN_RECORD):
        assert (tmp_path / "out2" / file).read_bytes() == (out / file).read_bytes(), file


def test_the_card_has_what_was_trained_and_measured(made: Made, tmp_path: Path):
    run = made.folder / "dar-block"
    export(run, tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    loss = json.loads((run / "summary.json").read_text())["validation_loss"]
    for wanted in (
        f"| validation loss | {loss:.4f} |",
        "`dar-block`",
        "2,560 tokens",
        "| learning_rate |",
        "on `data`",
    ):
        assert wanted in card, wanted
    assert str(made.folder) not in card + (tmp_path / "out" / RUN_RECORD).read_text()  # no place of this machine
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_best_and_last_and_dtype(made: Made, tmp_path: Path):
    run = made.folder / "dar-block"
    export(run, tmp_path / "best", checkpoint="best", dtype="bfloat16")
    best = open_model(tmp_path / "best")
    wanted = open_model(run, checkpoint="best").decoder.bfloat16()
    assert best.dtype == best.hf_model.config.dtype == torch.bfloat16
    assert all(torch.equal(p, q) for p, q in zip(best.decoder.parameters(), wanted.parameters(), strict=True))


def test_standard_as_llama_and_the_others_refused(made: Made, tmp_path: Path):
    export(made.folder / "standard", tmp_path / "llama", form="llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "llama")
    assert isinstance(model, transformers.LlamaForCausalLM)
    with torch.no_grad():
        assert relative_error(model(TOKENS).logits, open_model(made.folder / "standard").decoder(TOKENS)) < 1e-5
    assert not list((tmp_path / "llama").glob("*.py"))
    assert "import dualres" not in (tmp_path / "llama" / "README.md").read_text()
    with pytest.raises(ModelError, match="uses dar-block: only `standard`"):
        export(made.folder / "dar-block", tmp_path / "no", form="llama")
    assert not (tmp_path / "no").exists()


def test_a_folder_that_is_there_is_not_touched(made: Made, tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    for work in (lambda: export(made.folder / "standard", tmp_path), lambda: import_run(tmp_path, tmp_path)):
        with pytest.raises(ModelError):
            work()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_save_that_fails_leaves_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dualres.hub.remote_code.add_code", full)
    with pytest.raises(OSError, match="No space"):
        export(made.folder / "standard", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


DAMAGED = {
    "another method": (lambda f: _change(f, ["residual"], {"method": "standard"}), "is unexpected"),
    "another width": (lambda f: _change(f, ["model", "width"], 64), r"model.safetensors is 257×32, not 257×64"),
    "an unknown key": (lambda f: _change(f, ["model", "depth"], 3), "unknown key model.depth=3"),
    "no section": (lambda f: _change(f, ["residual"], None), "residual=None is not a section"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
    "half of the weights": (lambda f: _truncate(f / "model.safetensors"), "is not a valid safetensors file"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_folder_is_refused_by_name(name: str, exported: Path):
    damage, message = DAMAGED[name]
    damage(exported)
    with pytest.raises(ModelError, match=message):
        open_model(exported)


def test_transformers_refuses_tensors_that_do_not_match(exported: Path):
    _change(exported, ["residual", "method"], "dar-selfkv")
    transformers.AutoModelForCausalLM.from_pretrained(exported)  # the same tensors
    _change(exported, ["residual"], {"method": "standard"})
    with pytest.raises(ValueError, match="do not match its config"):
        transformers.AutoModelForCausalLM.from_pretrained(exported)


def _change(folder: Path, keys: list[str], value: object) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    place = config
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(config))


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_training_goes_on_from_a_saved_model(made: Made, tmp_path: Path):
    """The first loss is the source's, not a fresh model's; a resumed run does not begin again."""
    export(made.folder / "standard", tmp_path / "llama", form="llama")
    convert(str(tmp_path / "llama"), tmp_path / "dar", "dar-block", ["residual.branches_per_block=2"])
    start = open_start(tmp_path / "dar", made.data).decoder
    assert start.norm.weight.is_meta
    changes = [change for change in overrides(train__tokens=8 * 4 * 32) if change.startswith("train.")]
    config = load_recipe("nano", start.config, start.residual_config, changes)
    assert config.model.read_eps is not None
    told = Told()
    train(config, made.data, tmp_path / "run", ALONE, told, start=tmp_path / "dar")
    assert "starting from the weights" in " ".join(told.said)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    fresh = json.loads((made.folder / "standard" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert fresh == pytest.approx(math.log(257), abs=0.2)
    assert first < fresh - 0.3
    assert json.loads((tmp_path / "run" / "config.json").read_text())["start"] == "dar"
    before = open_model(tmp_path / "run").decoder.state_dict()
    told = Told()
    (tmp_path / "dar").rename(tmp_path / "moved")
    train(config, made.data, tmp_path / "run", ALONE, told, start=tmp_path / "moved")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["start"] == "dar"
    assert "resumed" in " ".join(told.said)
    after = open_model(tmp_path / "run").decoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_data_of_another_tokenizer_are_refused(made: Made, exported: Path, tmp_path: Path):
    prepare(Settings(str(made.folder / "topics.jsonl"), "bpe:300", held_out=0.1), tmp_path / "data")
    with pytest.raises(DataError, match=r"a different tokenizer .* --tokenizer .*tokenizer.json"):
        open_start(exported, tmp_path / "data")


def test_an_imported_run_says_how_to_train_on(made: Made, exported: Path, tmp_path: Path):
    import_run(exported, tmp_path / "run")
    config = tiny_config("dar-block", train__tokens=20 * 4 * 32)
    with pytest.raises(TrainError, match="it was imported"):
        train(config, made.data, tmp_path / "run", ALONE, Told())


def test_what_was_not_exported_from_a_run_is_not_imported(made: Made, tmp_path: Path):
    convert(str(saved_family_model("llama", tmp_path / "source")), tmp_path / "out", "dar-block")
    with pytest.raises(ModelError, match="was not exported from a run"):
        import_run(tmp_path / "out", tmp_path / "run")
    with pytest.raises(ModelError, match="has a llama model"):
        import_run(tmp_path / "source", tmp_path / "run")


def test_models_of_all_kinds_agree(made: Made, tmp_path: Path):
    export(made.folder / "standard", tmp_path / "ours")
    export(made.folder / "standard", tmp_path / "llama", form="llama")
    folders = made.folder / "standard", tmp_path / "ours", tmp_path / "llama"
    models = [open_model(path, architectures="any") for path in folders]
    assert [model.name for model in models] == ["standard", "ours", "llama"]
    assert {model.context for model in models} == {32}
    assert {model.vocab_size for model in models} == {257}
    assert {model.prefix for model in models} == {256}
    assert {model.ends for model in models} == {frozenset([256])}
    assert {tuple(model.encode("ab")) for model in models} == {(97, 98)}
    assert {tuple(model.encode("")) for model in models} == {(256,)}
    assert {model.decode([97, 98, 256]) for model in models} == {"ab"}
    assert len({tokenizer_digest(model) for model in models}) == 1
    assert len({model.identity for model in models}) == 3
    assert open_model(tmp_path / "ours").identity == models[1].identity
    assert open_model(tmp_path / "ours", dtype="bfloat16").identity != models[1].identity
    with torch.no_grad():
        wanted = models[0].logits(TOKENS)
        assert torch.equal(models[0].hf_model(TOKENS).logits, wanted)
        assert torch.equal(models[1].logits(TOKENS), wanted)
        assert relative_error(models[2].logits(TOKENS), wanted) < 1e-5
    for take in (lambda: models[2].decoder, lambda: open_model(tmp_path / "llama")):
        with pytest.raises(ModelError, match="has a llama model"):
            take()
    (tmp_path / "llama" / "tokenizer.json").unlink()
    (tmp_path / "llama" / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        _ = open_model(tmp_path / "llama", architectures="any").prefix


def test_commands(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run, out = str(made.folder / "standard"), str(tmp_path / "llama")
    assert cli.main(["export", run, out, "--form", "llama"]) == 0
    assert cli.main(["convert", out, str(tmp_path / "dar"), "--residual", "dar-block"]) == 0
    assert "relative logit difference" in capsys.readouterr().out
    assert cli.main(["convert", out, str(tmp_path / "dar"), "--residual", "dar-block"]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert cli.main(["export", run, str(tmp_path / "ours")]) == 0
    assert cli.main(["import", str(tmp_path / "ours"), str(tmp_path / "run")]) == 0
    assert run_record(open_model(tmp_path / "run")) is not None
    shutil.rmtree(tmp_path / "ours")
    data = ["--data", str(made.data), "--out", str(tmp_path / "more")]
    changes = [
        word for change in overrides(train__tokens=4 * 4 * 32) if "train." in change for word in ("--set", change)
    ]
    began = ["--from", str(tmp_path / "dar")]
    assert cli.main(["train", "nano", "dar-block", *began, *data, *changes]) == 0
    assert cli.main(["train", "nano", "mhc-4", *began, *data, *changes]) == 2
    assert "use the model's method" in capsys.readouterr().err


CONSOLE = """
import sys
from dualres.__main__ import run

def command(*words):
    sys.argv = ["dualres", *words]
    try:
        run()
    except SystemExit as ended:
        assert ended.code == 0

trained, exported, out = sys.argv[1:]
command("generate", trained, "x", "--tokens", "2")
assert "transformers" not in sys.modules
command("convert", exported, out, "--residual", "dar-block")
"""


@pytest.mark.slow  # it saves seconds, not correctness
def test_the_console_imports_transformers_where_it_is_needed(made: Made, tmp_path: Path):
    """It takes seconds, and a run's generation does without; a dualres model as a source must be known to it."""
    export(made.folder / "standard", tmp_path / "exported")
    words = [str(path) for path in (made.folder / "standard", tmp_path / "exported", tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", CONSOLE, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


RECORDS = {
    "another method": (lambda r: r["config"]["residual"].update(method="dar-selfkv"), "differs from config.json"),
    "other layers": (lambda r: r["config"]["model"].update(layers=3), "differs from config.json"),
    "an unknown key": (lambda r: r["config"]["model"].update(depth=3), "unknown key"),
    "half a step": (lambda r: r["state"].update(step=4.5), "step=4.5 is not a count"),
    "no fingerprint": (lambda r: r["data"].pop("fingerprint"), "fingerprint"),
    "another tokenizer": (lambda r: r["data"].update(fingerprint="0"), "is not the tokenizer"),
    "a loss beyond all numbers": (lambda r: r["state"].update(best_loss=10**400), "is not what"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_does_not_fit_is_not_imported(name: str, exported: Path, tmp_path: Path):
    change, message = RECORDS[name]
    record = json.loads((exported / RUN_RECORD).read_text())
    change(record)
    (exported / RUN_RECORD).write_text(json.dumps(record))
    with pytest.raises(ModelError, match=message):
        import_run(exported, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_exported_folder_is_exported_again(made: Made, tmp_path: Path):
    export(made.folder / "dar-block", tmp_path / "a")
    export(tmp_path / "a", tmp_path / "b")
    import_run(tmp_path / "b", tmp_path / "run")
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (tmp_path / "a" / "tokenizer.json").read_bytes()
    with pytest.raises(ModelError, match="is an exported model, not a run: --checkpoint does not apply"):
        export(tmp_path / "a", tmp_path / "c", checkpoint="best")


def test_training_from_a_folder_reads_its_model_and_nothing_else(made: Made, exported: Path):
    start = open_start(exported, made.data).decoder
    for override in ("residual.method=dar-selfkv", "model.rope_base=5", "residual.gate_scale=1"):
        with pytest.raises(ConfigError, match="existing model cannot be changed"):
            load_recipe("nano", start.config, start.residual_config, [override])
    assert load_recipe("nano", start.config, start.residual_config, ["model.context=16"]).model.context == 16
    shutil.copyfile(exported / "model.safetensors", exported / "backup.safetensors")
    with pytest.raises(ModelError, match=r"backup.safetensors does not belong to the model"):
        open_start(exported, made.data)
    with pytest.raises(ModelError, match="is a run: export it"):
        open_start(made.folder / "dar-block", made.data)


def test_a_full_disk_is_named(made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert cli.main(["export", str(made.folder / "standard"), str(tmp_path / "out")]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert "free some space there" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_generate_takes_runs_and_exported_models(made: Made, exported: Path, capsys: pytest.CaptureFixture[str]):
    said = []
    for model in (made.folder / "dar-block", exported):
        assert cli.main(["generate", str(model), "def main(", "--tokens", "12", "--seed", "3"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    (exported / RUN_RECORD).write_text("[]")
    with pytest.raises(ModelError, match="is not what `dualres export` writes"):
        run_record(open_model(exported))
    (exported / "tokenizer.json").unlink()
    (exported / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="has no tokenizer"):
        open_model(exported).encode("x")

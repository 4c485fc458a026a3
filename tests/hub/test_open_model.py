"""Opened models: the right weights, tokens and checkpoint, or a refusal by name; and no code of strangers."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dualres.hub.open_model import open_model
from dualres.train.loop import train
from dualres.util.errors import ModelError
from dualres.util.optional_dependencies import MissingExtraError
from tests.evaluate.tiny import CONTEXT, save_tiny
from tests.train.tiny import ALONE, Told, tiny_config, tiny_data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "tiny")


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_an_old_transformers_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "dualres.hub.hf_config", None)  # as if it could not import what it needs
    with pytest.raises(MissingExtraError, match=r"needs the package transformers \(extra hub\): pip install -e"):
        open_model(folder, architectures="any")


def test_an_opened_model_is_as_it_was_saved(folder: Path):
    model = open_model(folder, architectures="any")
    assert (model.name, model.context, model.prefix) == ("tiny", CONTEXT, 256)
    assert not model.network.training
    assert model.identity == open_model(folder, architectures="any").identity


def test_the_beginning_of_a_text_goes_before_the_end_of_the_last(folder: Path):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token": "!"}))
    assert open_model(folder, architectures="any").prefix == ord("!")


IDENTITIES = {
    "weights": lambda f: change_weights(f, lambda t: t["model.norm.weight"].add_(1)),
    "config": lambda f: change_config(f, rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
    "tokenizer": lambda f: (f / "tokenizer.json").write_text((f / "tokenizer.json").read_text() + "\n"),
    "a vocabulary in other files": lambda f: (f / "merges.txt").write_text("a b\n"),
}


@pytest.mark.parametrize("name", IDENTITIES)
def test_whatever_decides_a_number_is_in_the_identity(name: str, folder: Path):
    before = open_model(folder, architectures="any").identity
    IDENTITIES[name](folder)
    assert open_model(folder, architectures="any").identity != before


REFUSED = {
    "a tensor too few": (lambda f: change_weights(f, lambda t: t.pop("model.norm.weight")), "norm.weight is missing"),
    "a tensor too many": (
        lambda f: change_weights(f, lambda t: t.update({"model.layers.2.input_layernorm.weight": torch.ones(32)})),
        "layers.2.input_layernorm.weight is unexpected",
    ),
    "fewer layers in the config": (lambda f: change_config(f, num_hidden_layers=1), "layers.1.* is unexpected"),
    "another width": (lambda f: change_config(f, intermediate_size=48), r"proj.weight is .*64.*, not .*48"),
    "a width in words": (lambda f: change_config(f, hidden_size="32"), "transformers cannot read"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "has no tokenizer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_match_is_refused_by_name(name: str, folder: Path):
    damage, message = REFUSED[name]
    damage(folder)
    with pytest.raises(ModelError, match=message):
        _ = open_model(folder, architectures="any").prefix


def test_code_of_strangers_is_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nor does anyone ask whether it may be: a `yes` would run it."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    evil = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaForCausalLM as Evil, LlamaConfig\n"
    (folder / "evil.py").write_text(evil)
    named = {"AutoConfig": "evil.LlamaConfig", "AutoModelForCausalLM": "evil.Evil"}
    for kind in ("llama", "unheard-of"):
        change_config(folder, model_type=kind, auto_map=named)
        if kind == "llama":
            assert open_model(folder, architectures="any").context == CONTEXT
        else:
            with pytest.raises(ModelError):
                open_model(folder, architectures="any")
    assert not (tmp_path / "ran").exists()


def test_rounding_weights_leaves_positions_alone(folder: Path):
    model = open_model(folder, architectures="any", dtype="bfloat16").network
    assert model.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_a_model_that_looks_ahead_is_refused(folder: Path):
    size: dict[str, Any] = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.BertConfig(**size, num_attention_heads=2, max_position_embeddings=CONTEXT)
    transformers.BertLMHeadModel(config).save_pretrained(folder)
    with pytest.raises(ModelError, match="is not a causal language model"):
        open_model(folder, architectures="any")


def test_best_and_last_are_different_models(tmp_path: Path):
    """A run whose last checkpoint is not its best."""
    steps: dict[str, Any] = {"train__validate_every": 4, "train__checkpoint_every": 4, "train__warmup_steps": 12}
    config = tiny_config("standard", train__tokens=12 * 4 * 32, train__learning_rate=3.0, **steps)
    train(config, tiny_data(tmp_path), tmp_path / "run", ALONE, Told())
    state = json.loads(sorted((tmp_path / "run" / "checkpoints").glob("*/state.json"))[-1].read_text())
    assert state["best_step"] < state["step"]
    last, best = (open_model(tmp_path / "run", architectures="any", checkpoint=which) for which in ("last", "best"))
    assert last.identity != best.identity
    pairs = zip(last.network.parameters(), best.network.parameters(), strict=True)
    assert any(not torch.equal(p, q) for p, q in pairs)


def test_an_empty_prompt_starts_with_bos_or_eos(folder: Path):
    model = open_model(folder, architectures="any")
    tokenizer, settings = model.tokenizer, model.network.generation_config
    tokenizer.bos_token, tokenizer.eos_token, settings.eos_token_id = None, None, [9, 5]
    assert model.encode("") == [5]  # the model's own: its tokenizer has none
    settings.eos_token_id = None
    with pytest.raises(ModelError, match="neither a BOS nor an EOS token to start from: pass a prompt"):
        model.encode("")


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None  # importing it fails
from dualres.cli import main
run, data, out = sys.argv[1:]
assert main(["generate", run, "def main(", "--tokens", "4"]) == 0
assert main(["evaluate", run, "--validation", data, "--validation-tokens", "64", "--out", out]) == 0
few = ["--sequences", "1", "--last", "8", "--retrieval-sequences", "1"]
assert main(["analyze", run, *few]) == 0
assert main(["evaluate", run, "--perplexity", data, "--out", out]) == 2
assert main(["export", run, out + "/exported"]) == 2
"""


def test_a_run_needs_no_transformers(tmp_path: Path):
    """To be generated from, validated and analyzed; what does need it says how to install it."""
    data = tiny_data(tmp_path)
    train(tiny_config("dar-block", train__tokens=4 * 4 * 32), data, tmp_path / "run", ALONE, Told())
    (tmp_path / "texts").mkdir()
    words = [str(tmp_path / name) for name in ("run", "data", "out")]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "needs the package transformers (extra hub): pip install -e '.[hub]'" in done.stderr

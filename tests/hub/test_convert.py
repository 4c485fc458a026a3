"""A checkpoint of Llama's family on any residual pathway: the same outputs at the start, and it learns from there."""

import functools
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from dualres.config import ConfigError
from dualres.experiment import names
from dualres.hub.convert import Source, convert, decoder_of, local_folder, read_source, target
from dualres.hub.errors import ModelError
from dualres.hub.export import export
from tests.hub.family import FAMILY, SIZE, family_model, saved_family_model
from tests.small import next_token_loss, random_tokens, real_text, relative_error

RESIDUALS = names("residual")


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("name", FAMILY)
def test_every_model_on_every_pathway_gives_the_same_logits(name: str, residual: str, sources: Callable[[str], Source]):
    rank = ["residual.value_rank=8"] if residual == "attnres-vproj-96" else []
    source = sources(name)
    decoder = decoder_of(source, *target(source, residual, rank), seed=0)
    tokens = random_tokens(2, 41)
    with torch.no_grad():
        wanted = family_model(name)(tokens).logits
        assert wanted.std() > 0.3
        assert relative_error(decoder(tokens), wanted) < 1e-4


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """Each model of the family, saved once."""
    folder = tmp_path_factory.mktemp("family")
    return functools.cache(lambda name: read_source(saved_family_model(name, folder / name)))


@pytest.mark.parametrize("residual", RESIDUALS)
def test_what_is_written_loads_as_it_was(residual: str, tmp_path: Path):
    source = saved_family_model("qwen2", tmp_path / "source")
    rank = ["residual.value_rank=8"] if residual == "attnres-vproj-96" else []
    made = convert(str(source), tmp_path / "out", residual, rank)
    assert made.difference is not None
    assert made.difference < 1e-4
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = random_tokens(2, 41)
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, made.model(tokens).logits)


@pytest.mark.parametrize("name", FAMILY)
def test_standard_goes_back_bit_for_bit(name: str, tmp_path: Path):
    source = saved_family_model(name, tmp_path / "source")
    convert(str(source), tmp_path / "ours", "standard", check=False)
    export(tmp_path / "ours", tmp_path / "theirs", form="llama")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "theirs" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    tokens = random_tokens(2, 41)
    with torch.no_grad():
        assert torch.equal(back(tokens).logits, family_model(name)(tokens).logits)


def test_bfloat16_stays_bfloat16(tmp_path: Path):
    family_model("llama").bfloat16().save_pretrained(tmp_path / "source")
    made = convert(str(tmp_path / "source"), tmp_path / "out", "dar-block")
    assert made.difference is not None
    assert made.difference < 1e-4
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}


def test_an_eps_that_is_not_adapted_would_be_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = saved_family_model("llama-multi-head-large-eps", tmp_path / "source")
    monkeypatch.setattr("dualres.model.block.ResidualStack.start_divisors", lambda self: [1.0] * 11)
    with pytest.raises(ModelError, match=r"differ .* by .*: nothing was written"):
        convert(str(source), tmp_path / "out", "dar-block")
    assert not (tmp_path / "out").exists()


def test_a_dualres_standard_model_is_a_source_too(tmp_path: Path):
    source = saved_family_model("qwen3", tmp_path / "source")
    convert(str(source), tmp_path / "standard", "standard")
    made = convert(str(tmp_path / "standard"), tmp_path / "dar", "dar-full")
    assert made.difference is not None
    assert made.difference < 1e-4
    with pytest.raises(ModelError, match="is on dar-full"):
        convert(str(tmp_path / "dar"), tmp_path / "more", "mhc-4")


@pytest.mark.parametrize("residual", ["dar-block", "dar-full"])
def test_training_on_separates_the_streams_and_loses_nothing(residual: str, tmp_path: Path):
    """Fifty steps on the same batches, beside the standard continuation."""
    source = trained_source(tmp_path / "source")
    losses: dict[str, float] = {}
    for name in ("standard", residual):
        model = convert(str(source), tmp_path / name, name).model
        losses[name] = _continued(model, steps=50)
        if name == residual:
            assert _separation(model) > 1e-3
    assert losses[residual] < losses["standard"] + 0.02


def trained_source(folder: Path) -> Path:
    """A Llama that has learned something of English."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**SIZE, "vocab_size": 256, "num_hidden_layers": 4}
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config)
    _continued(model, steps=60, first=0, rate=3e-3)
    model.save_pretrained(folder)
    return folder


def _continued(model: Any, steps: int, first: int = 60, rate: float = 1e-3) -> float:
    """The mean loss of the last ten steps."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    losses = []
    for step in range(first, first + steps):
        tokens = real_text(8, 64, step)
        loss = next_token_loss(model(tokens, use_cache=False).logits, tokens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return sum(losses[-10:]) / 10


@torch.no_grad()
def _separation(model: Any) -> float:
    """The relative difference of the two streams in the last block's state."""
    states = []
    last = list(model.decoder.stack)[-1]
    handle = last.register_forward_hook(lambda module, args, output: states.append(output))
    model(real_text(4, 64, 200))
    handle.remove()
    first, second = states[0].double()
    return float((first - second).norm() / (first.norm() * second.norm()).sqrt())


REFUSED = {
    "another architecture": (lambda c: c.update(model_type="gpt2"), "is a gpt2 model"),
    "rope by yarn": (
        lambda c: c.update(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
        "rope_type=yarn",
    ),
    "another activation": (lambda c: c.update(hidden_act="gelu"), "hidden_act=gelu"),
    "biases in the feed-forward": (lambda c: c.update(mlp_bias=True), "mlp_bias=True"),
    "tensors of another width": (
        lambda c: c.update(intermediate_size=64),
        r"gate_proj.weight in .* is 56×32, not 64×32",
    ),
    "fewer layers": (lambda c: c.update(num_hidden_layers=4), r"layers\.4\..*which is not part of it"),
    "more layers": (lambda c: c.update(num_hidden_layers=6), r"layers\.5\..* is missing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    change, message = REFUSED[name]
    config = json.loads((source / "config.json").read_text())
    change(config)
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        convert(str(source), tmp_path / "out", "dar-block")
    assert not (tmp_path / "out").exists()


def test_a_sliding_window_is_refused_unless_the_context_fits(tmp_path: Path):
    model = family_model("mistral")
    model.config.sliding_window = 24
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ModelError, match=r"looks back 24 tokens .*--set model.context=24"):
        convert(str(tmp_path / "source"), tmp_path / "out", "dar-block")
    made = convert(str(tmp_path / "source"), tmp_path / "out", "dar-block", ["model.context=24"])
    assert made.model.config.max_position_embeddings == 24


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_never_opened(protocol: int, tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    for suffix, message in ((".safetensors", "is a pickle with another name"), (".bin", "is a pickle, which can run")):
        (source / "model.safetensors").unlink(missing_ok=True)
        file = source / f"model{suffix}"
        file.write_bytes(pickle.dumps({"lm_head.weight": 1}, protocol))
        with pytest.raises(ModelError, match=message) as refused:
            convert(str(source), tmp_path / "out", "dar-block")
        assert file.name in str(refused.value)


def test_a_truncated_file_and_a_missing_shard_are_named(tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model.safetensors is no whole safetensors file"):
        convert(str(source), tmp_path / "out", "dar-block")
    shutil.rmtree(source)
    family_model("llama").save_pretrained(source, max_shard_size="20KB")
    assert convert(str(source), tmp_path / "sharded", "dar-block").difference
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name} is missing"):
        convert(str(source), tmp_path / "out", "dar-block")


def test_a_tied_output_that_is_stored_twice_is_taken_once(tmp_path: Path):
    source = saved_family_model("llama-tied", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert convert(str(source), tmp_path / "out", "dar-block").difference is not None


def test_only_the_pathway_and_the_context_can_be_set(tmp_path: Path):
    source = read_source(saved_family_model("llama", tmp_path / "source"))
    _, residual = target(source, "dar-block", ["residual.layers_per_block=1", "residual.rho_bias=0"])
    assert (residual.layers_per_block, residual.rho_bias, residual.gate_scale) == (1, 0, 0)
    with pytest.raises(ConfigError, match="a converted model is what its source is"):
        target(source, "dar-block", ["model.layers=3"])
    with pytest.raises(ConfigError, match="gate scale 0 only"):
        target(source, "dar-block", ["residual.gate_scale=1"])


def test_a_name_that_is_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="neither a folder nor a model"):
        local_folder("nobody/nothing-of-the-kind")

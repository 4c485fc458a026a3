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

from dualres.config.loading import names
from dualres.config.schema import ConfigError, ResidualConfig
from dualres.data.tokenizer import byte_tokenizer
from dualres.hub.convert import Source, convert, load_decoder, read_source, target
from dualres.hub.export import export
from dualres.hub.hf_model import DualResForCausalLM
from dualres.hub.model_folder import local_folder
from dualres.hub.open_model import as_transformers, open_model
from dualres.util.errors import ModelError
from tests.hub.family import FAMILY, SIZE, family_model, saved_family_model, some_first
from tests.small import model_config, next_token_loss, random_tokens, real_text, relative_error, stirred

RESIDUALS = names("residual")
PAIRS = [  # each model and each pathway once; the product only before a release
    pytest.param(name, residual, marks=() if name == "llama" or residual == "dar-block" else pytest.mark.exhaustive)
    for name in FAMILY
    for residual in RESIDUALS
]
WRITTEN = some_first(RESIDUALS, "dar-block", "mhc-4", "attnres-vproj-96")
RETURNED = some_first(FAMILY, "llama", "llama-llama3-rope", "mistral-wide-heads", "qwen2-tied", "qwen3-biases-tied")


@pytest.mark.parametrize(("name", "residual"), PAIRS)
def test_every_model_on_every_pathway_gives_the_same_logits(name: str, residual: str, sources: Callable[[str], Source]):
    rank = ["residual.value_rank=8"] if residual == "attnres-vproj-96" else []
    source = sources(name)
    decoder = load_decoder(source, *target(source, residual, rank), seed=0)
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


@pytest.mark.parametrize("residual", WRITTEN)
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


@pytest.mark.parametrize("name", RETURNED)
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
    with pytest.raises(ModelError, match="has the residual dar-full"):
        convert(str(tmp_path / "dar"), tmp_path / "more", "mhc-4")


@pytest.mark.slow
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
    handle = last.register_forward_hook(lambda module, args, found: states.append(found[0]))
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
    "quantised weights": (lambda c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization"),
    "heads that rotate in part": (
        lambda c: c.update(
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        "partial_rotary_factor",
    ),
    "llama3 without its factors": (
        lambda c: c.update(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
        r"original_max_position_embeddings|high_freq_factor|low_freq_factor",
    ),
    "a width in words": (lambda c: c.update(hidden_size="32"), r"transformers cannot read .*config.json"),
    "no heads": (lambda c: c.update(num_attention_heads=0), r"config.json"),
    "a list of types": (lambda c: c.update(model_type=["llama"]), "dualres can convert"),
    "biases in the feed-forward": (lambda c: c.update(mlp_bias=True), "mlp_bias=True"),
    "tensors of another width": (
        lambda c: c.update(intermediate_size=64),
        r"gate_proj.weight in .* is 56×32, not 64×32",
    ),
    "fewer layers": (lambda c: c.update(num_hidden_layers=4), r"layers\.4\..*is unexpected"),
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
    with pytest.raises(ModelError, match=r"has sliding_window=24 .*--set model.context=24"):
        convert(str(tmp_path / "source"), tmp_path / "out", "dar-block")
    made = convert(str(tmp_path / "source"), tmp_path / "out", "dar-block", ["model.context=24"])
    assert made.model.config.max_position_embeddings == 24


def test_a_window_that_no_layer_uses_is_none(tmp_path: Path):
    """As Qwen2.5's configs have it: a sliding_window, and use_sliding_window false."""
    source = saved_family_model("qwen2", tmp_path / "source")
    path = source / "config.json"
    config = {**json.loads(path.read_text()), "sliding_window": 8, "use_sliding_window": False}
    config.pop("layer_types", None)
    path.write_text(json.dumps(config))
    assert convert(str(source), tmp_path / "out", "dar-block").difference is not None
    used = {**config, "use_sliding_window": True, "max_window_layers": 2}
    path.write_text(json.dumps(used))
    with pytest.raises(ModelError, match="has sliding_window=8"):
        convert(str(source), tmp_path / "more", "dar-block")


def test_tokens_settings_and_tokenizer_come_along(tmp_path: Path):
    """A generation config with an old mistake too: a temperature, and no sampling."""
    source = saved_family_model("llama", tmp_path / "source")
    as_transformers(byte_tokenizer(), 64).save_pretrained(source)
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "bos_token_id": 5, "eos_token_id": [6, 7]}))
    (source / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [6, 8]})
    )
    convert(str(source), tmp_path / "out", "standard")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (5, [6, 7])
    settings = loaded.generation_config
    assert (settings.temperature, settings.do_sample, settings.eos_token_id) == (0.6, True, [6, 8])
    assert open_model(tmp_path / "out").ends == {6, 8}
    export(tmp_path / "out", tmp_path / "back", form="llama")
    back = transformers.GenerationConfig.from_pretrained(tmp_path / "back")
    assert (back.temperature, back.eos_token_id) == (0.6, [6, 8])
    (source / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"cannot read .*generation_config.json"):
        convert(str(source), tmp_path / "more", "standard")


def test_gates_of_all_blocks_differ(tmp_path: Path):
    source = read_source(saved_family_model("llama", tmp_path / "source"))
    decoder = load_decoder(source, *target(source, "dar-block"), seed=0)
    gates = [p.flatten()[:4] for name, p in decoder.named_parameters() if "gate" in name and name.endswith(".weight")]
    gates = [gate for gate in gates if len(gate) == 4]
    assert len({tuple(gate.tolist()) for gate in gates}) == len(gates) > 6


def test_sources_that_would_lose_something(tmp_path: Path):
    """Of our own form: another eps in each norm is kept, experts and factorized vocabularies are refused."""
    tokens = random_tokens()
    size: dict[str, Any] = {"vocab_size": 97, "read_eps": tuple(0.02 * (i + 1) for i in range(11))}
    model = DualResForCausalLM.of(stirred(model_config(**size), ResidualConfig("standard"), noise=0.1)).eval()
    model.save_pretrained(tmp_path / "eps")
    made = convert(str(tmp_path / "eps"), tmp_path / "dar", "dar-block").model
    with torch.no_grad():
        assert relative_error(made(tokens).logits, model(tokens).logits) < 1e-4
    with pytest.raises(ModelError, match="read_eps"):
        export(tmp_path / "eps", tmp_path / "no", form="llama")
    for name, changes, message in (
        ("moe", {"feedforward": "moe"}, "has experts"),
        ("narrow", {"embedding_width": 16}, "factorized vocabulary"),
    ):
        decoder = stirred(model_config(**changes), ResidualConfig("standard"))
        DualResForCausalLM.of(decoder).save_pretrained(tmp_path / name)
        with pytest.raises(ModelError, match=message):
            convert(str(tmp_path / name), tmp_path / "out", "dar-block", check=False)


def test_old_tensors_that_are_computed_are_left_out(tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert convert(str(source), tmp_path / "out", "dar-block").difference is not None


@pytest.mark.parametrize("kinds", [("float16", "bfloat16"), ("float32", "bfloat16")])
def test_mixed_dtypes_meet_in_float32(kinds: tuple[str, str], tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    mixed = {name: t.to(getattr(torch, kinds[i % 2])) for i, (name, t) in enumerate(sorted(tensors.items()))}
    save_file(mixed, source / "model.safetensors", {"format": "pt"})
    assert convert(str(source), tmp_path / "out", "standard").model.dtype == torch.float32


def test_weights_that_are_not_finite_are_the_sources_own_fault(tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match="itself has logits that are not finite"):
        convert(str(source), tmp_path / "out", "dar-block")


def test_a_folder_that_is_taken_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ModelError, match="exists and is not empty"):
        convert("nobody/nothing", tmp_path, "dar-block")
    source = saved_family_model("llama", tmp_path / "source")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert(str(source), Path("."), "dar-block", check=False)
    assert (tmp_path / "here" / "model.safetensors").is_file()


@pytest.mark.parametrize("protocol", [2, 5])
def test_a_pickle_is_never_opened(protocol: int, tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    for suffix, message in (
        (".safetensors", "is a pickle file with the wrong extension"),
        (".bin", "is a pickle file, which can execute"),
    ):
        (source / "model.safetensors").unlink(missing_ok=True)
        file = source / f"model{suffix}"
        file.write_bytes(pickle.dumps({"lm_head.weight": 1}, protocol))
        with pytest.raises(ModelError, match=message) as refused:
            convert(str(source), tmp_path / "out", "dar-block")
        assert file.name in str(refused.value)
    (source / "model.bin").unlink()
    torch.save({"lm_head.weight": torch.ones(2)}, source / "model.safetensors")  # a zip around a pickle
    with pytest.raises(ModelError, match="is a pickle file with the wrong extension"):
        convert(str(source), tmp_path / "out", "dar-block")


def test_a_truncated_file_and_a_missing_shard_are_named(tmp_path: Path):
    source = saved_family_model("llama", tmp_path / "source")
    whole = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model.safetensors is not a valid safetensors file"):
        convert(str(source), tmp_path / "out", "dar-block")
    shutil.rmtree(source)
    family_model("llama").save_pretrained(source, max_shard_size="20KB")
    assert convert(str(source), tmp_path / "sharded", "dar-block").difference
    shard = sorted(source.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelError, match=f"{shard.name}, listed in .*, is missing"):
        convert(str(source), tmp_path / "out", "dar-block")


def test_a_tied_output_that_is_stored_twice_is_taken_once(tmp_path: Path):
    source = saved_family_model("llama-tied", tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert convert(str(source), tmp_path / "out", "dar-block").difference is not None


def test_only_the_pathway_and_the_context_can_be_set(tmp_path: Path):
    source = read_source(saved_family_model("llama", tmp_path / "source"))
    _, residual = target(source, "dar-block", ["residual.branches_per_block=2", "residual.rho_bias=0"])
    assert residual == ResidualConfig(
        "dar-block", branches_per_block=2, share_parameters=True, rho_bias=0, gate_scale=0
    )
    with pytest.raises(ConfigError, match="would change the source model"):
        target(source, "dar-block", ["model.layers=3"])
    with pytest.raises(ConfigError, match="--residual"):
        target(source, "dar-block", ["residual.method=mhc"])
    with pytest.raises(ConfigError, match="only with gate scale 0"):
        target(source, "dar-block", ["residual.gate_scale=1"])


def test_a_name_that_is_nowhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="neither a folder nor a model"):
        local_folder("nobody/nothing-of-the-kind")

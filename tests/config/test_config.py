"""Configs: every impossible one is refused, naming field, value and remedy."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from dualres.config.loading import CONFIGS, load_config, load_recipe, names, shortened_warmup
from dualres.config.schema import Config, ConfigError, ModelConfig, MoEConfig, ResidualConfig
from dualres.model.decoder import build_decoder
from dualres.residual import registry

PAPER_SCALES = ["0.1b", "0.3b", "0.5b", "1b", "moe-7b"]


PAIRS = [(scale, residual) for scale in names("scale") for residual in names("residual")]


@pytest.mark.parametrize(
    ("scale", "residual"),
    [
        pytest.param(*pair, marks=() if pair[0] == "nano" or pair[1] == "dar-block" else pytest.mark.slow)
        for pair in PAIRS
    ],
)
def test_every_pair_builds(scale: str, residual: str):
    config = load_config(scale, residual)
    build_decoder(config.model, config.residual, device="meta")


@pytest.mark.parametrize(
    ("scale", "steps", "tokens_per_step"),
    [("0.1b", 1907, 1048576), ("0.3b", 5722, 1048576), ("0.5b", 9537, 1048576), ("1b", 47684, 1048576)]
    + [("moe-7b", 60000, 524288)],
)
def test_paper_recipes(scale: str, steps: int, tokens_per_step: int):
    """Batch × 4096 tokens a step; 20 tokens per parameter, 50B, and 60,000 steps for the sparse model."""
    config = load_config(scale, "dar-block")
    train = config.train
    assert train.global_batch * config.model.context == tokens_per_step
    assert round(train.tokens / tokens_per_step) == steps
    assert (train.learning_rate, train.min_learning_rate, train.weight_decay, train.betas) == (
        3e-4,
        3e-5,
        0.1,
        (0.9, 0.95),
    )
    assert (train.adam_eps, train.clip, train.seed, train.micro_batch) == (1e-8, 1.0, 42, 2)
    assert train.warmup_steps == (300 if scale in ("0.1b", "0.3b", "0.5b") else 2000)
    assert registry.branches_per_block(config.residual) == (6 if scale == "moe-7b" else 4)
    assert config.model.vocab_size == 131_072
    assert config.model.context == 4096


def test_full_forms_keep_their_block_size_at_every_scale():
    for scale in PAPER_SCALES:
        blocks = {name: registry.branches_per_block(load_config(scale, name).residual) for name in names("residual")}
        assert blocks["attnres-full"] == blocks["attnres-vproj"] == 1
        assert {blocks[f"dar-{form}"] for form in ("full", "selfkv", "fixedkv", "crossv")} == {2}
        renamed = load_config(scale, "dar-block", ["residual.method=dar-full"]).residual
        assert registry.branches_per_block(renamed) == 2


def test_overrides():
    config = load_config(
        "nano", "mhc-2", ["residual.streams=3", "train.learning_rate=1e-3", "train.tokens=2e6", "train.compile=off"]
    )
    assert (config.residual.options, config.train.learning_rate, config.train.tokens) == (
        (("streams", 3),),
        1e-3,
        2_000_000,
    )
    assert config.train.compile == "off"
    unset = load_config("nano", "dar-block", ["residual.share_parameters=false", "residual.share_parameters=null"])
    assert unset.residual.options == ()
    replaced = load_config("nano-moe", "standard", ["model.moe=null", "model.ffn_width=8", "model.moe=null"])
    assert replaced.model.moe is None


def test_a_file_of_ones_own(tmp_path: Path):
    scale = tmp_path / "mine.yaml"
    scale.write_text("base: nano\nmodel:\n  layers: 3\n")
    config = load_config(str(scale), "dar-full")
    assert (config.model.layers, config.model.width) == (3, 96)


IMPOSSIBLE = [
    ("model.heads=7", ["model.width=96", "model.heads=7", "use heads 1, 2, 3, 4, 6, 8, 12, 16, 24 or 48"]),
    ("model.width=97", ["model.width=97", "use an even width"]),
    ("model.width=1e20", ["model.width=100000000000000000000", "at most"]),
    ("model.vocab_size=1e18", ["model.vocab_size=1000000000000000000", "at most"]),
    ("model.layers=[1", ["model.layers=[1", "is not valid YAML"]),
    ("model.layers=!!python/object:os.system {}", ["is not valid YAML"]),
    ("model.embedding_width=9999", ["model.embedding_width=9999", "at most 96"]),
    ("model.norm_eps=.inf", ["model.norm_eps=inf", "a finite number"]),
    ("model.norm_eps=0", ["model.norm_eps=0.0", "above 0"]),
    ("residual.gate_scale=.nan", ["residual.gate_scale=nan", "a finite number"]),
    ("residual.branches_per_block=.inf", ["residual.branches_per_block=inf", "a whole number"]),
    ("residual={method: attnres-vproj, value_rank: 97}", ["value_rank=97", "width 96"]),
    ("train.learning_rate=0", ["train.learning_rate=0.0", "above 0"]),
    ("train.weight_decay=-1", ["train.weight_decay=-1.0", "0 or more"]),
    ("train.adam_eps=-1", ["train.adam_eps=-1.0", "above 0"]),
    ("train.betas=[2, -1]", ["train.betas=(2.0, -1.0)", "(0.9, 0.95)"]),
    ("model.kv_heads=3", ["model.heads=4", "kv_heads=3", "1, 2 or 4"]),
    ("model.width=100", ["width=100", "heads of even width", "1, 2, 5, 10, 25 or 50"]),
    ("model.layers=0", ["model.layers=0", "1 or more"]),
    ("model.norm_eps=-1", ["model.norm_eps=-1.0", "above 0"]),
    ("model.init_std=0", ["model.init_std=0.0", "above 0"]),
    ("model.embedding_width=0", ["model.embedding_width=0", "1 or more"]),
    ("model.ffn_width=null", ["model.ffn_width is missing", "model.moe"]),
    ("model.moe={experts: 4, active: 2, expert_width: 8}", ["ffn_width=256 and model.moe are both set", "remove"]),
    ("model.moe={experts: 4, active: 5, expert_width: 8}", ["model.moe.active=5", "experts=4", "at most 4"]),
    ("model.moe={experts: 4, active: 2, expert_width: 9}", ["expert_width=9", "multiple of 8", "8 or 16"]),
    ("model.moe.active=2", ["model.moe.experts is missing"]),
    ("model.width=wide", ["model.width='wide'", "a whole number"]),
    ("model.width=1.5", ["model.width=1.5", "a whole number"]),
    ("model.tied_embeddings=3", ["model.tied_embeddings=3", "true or false"]),
    ("model.vocabulary=3", ["unknown key model.vocabulary=3"]),
    ("model.layer=3", ["unknown key model.layer=3", "model.layers?"]),
    ("model=3", ["model=3", "model.KEY=VALUE"]),
    ("model.layers", ["'model.layers'", "key.path=value"]),
    ("residual.method=dar", ["residual.method='dar'", "dar-block"]),
    (
        "residual.branches_per_block=1",
        ["branches_per_block=1", "16 branches", "collinear", "branches_per_block ≥ 2"],
    ),
    ("residual.branches_per_block=2.5", ["branches_per_block=2.5", "a whole number"]),
    ("residual.branches_per_block=0", ["branches_per_block=0", "1 or more"]),
    ("residual.branches_per_block=5", ["branches_per_block=5", "including the last", "collinear"]),
    ("residual.branches_per_block=18", ["branches_per_block=18", "16 branches", "at most 16"]),
    ("residual.share_parameters=layer", ["residual.share_parameters='layer'", "true or false"]),
    (
        "residual.streams=3",
        ["residual.streams=3", "not an option of dar-block", "share_parameters, gate_scale, rho_bias"],
    ),
    ("residual={method: mhc, sinkhorn_steps: 0}", ["residual.sinkhorn_steps=0", "1 or more"]),
    ("residual={method: mhc, streams: 1000000}", ["residual.streams=1000000", "at most 64"]),
    ("residual={method: mhc, sinkhorn_steps: 1e9}", ["residual.sinkhorn_steps=1000000000", "at most 1000"]),
    ("residual.branches_per_block=1e308", ["residual.branches_per_block=1", "at most 16"]),
    ("residual={method: attnres-vproj, value_rank: -1}", ["residual.value_rank=-1", "0 or more"]),
    ("residual.0=1", ["residual.0=1", "not an option of dar-block"]),
    ("residual={3: 4}", ["unknown key residual.3=4"]),
    ("train.micro_batch=3", ["global_batch=16", "micro_batch=3", "1, 2, 4, 8 or 16"]),
    ("train.min_learning_rate=1", ["min_learning_rate=1.0", "0.0003"]),
    ("train.betas=[0.9]", ["train.betas=[0.9]", "list of 2 numbers"]),
    ("model.read_eps=5", ["model.read_eps=5", "not a list of numbers"]),
    ("train.precision=fp8", ["train.precision='fp8'", "bf16 or fp32"]),
    ("train.parallel.zero_stage=4", ["train.parallel.zero_stage=4", "at most 3"]),
    ("train.tokens=1", ["train.tokens=1 ", "model.context=256", "at least 4096"]),
    ("train.warmup_steps=1e9", ["train.warmup_steps=1000000000", "732 steps", "fewer"]),
    ("train.parallel.tensor=3", ["train.parallel.tensor=3", "model.heads=4", "use 1 or 2"]),
    ("train.parallel.tensor=4", ["train.parallel.tensor=4", "model.kv_heads=2", "use 1 or 2"]),
    ("train.parallel.expert=2", ["train.parallel.expert=2", "use 1, or set model.moe"]),
    ("train.parallel.pipeline=9", ["train.parallel.pipeline=9", "model.layers=8", "at most 8"]),
    ("train.seed=-1", ["train.seed=-1", "0 or more"]),
    ("train.seed=1e20", ["train.seed=100000000000000000000", "at most 9223372036854775807"]),
    ("train.warmup_steps=-1", ["train.warmup_steps=-1", "0 or more"]),
]


@pytest.mark.parametrize(("override", "says"), IMPOSSIBLE, ids=[row[0] for row in IMPOSSIBLE])
def test_impossible_configs_are_refused(override: str, says: list[str]):
    def build() -> None:
        config = load_config("nano", "dar-block", [override])
        build_decoder(config.model, config.residual, device="meta")

    with pytest.raises(ConfigError) as refused:
        build()
    for part in says:
        assert part in str(refused.value)


def test_experts_that_do_not_split():
    with pytest.raises(ConfigError, match=r"train.parallel.expert=3 .* model.moe.experts=8: use 1, 2, 4 or 8"):
        load_config("nano-moe", "dar-block", ["train.parallel.expert=3"])


def test_the_block_size_of_a_scale_is_a_default():
    def size(residual: str, *overrides: str) -> int:
        return registry.branches_per_block(load_config("nano", residual, overrides).residual)

    default = "residual.default_branches_per_block=8"
    assert [size(name, default) for name in ("dar-block", "dar-full", "standard")] == [8, 2, 2]
    assert [size(name, default, "residual.branches_per_block=6") for name in ("dar-block", "dar-full")] == [6, 6]
    assert size("dar-block", "residual.default_branches_per_block=null") == 4
    for residual in ("dar-block", "standard"):  # also where the method does not use it
        with pytest.raises(ConfigError, match="default_branches_per_block='four' is not a whole number"):
            size(residual, "residual.default_branches_per_block=four")


def test_a_default_block_size_may_exceed_the_branches_and_a_given_one_may_not():
    shallow = ["model.layers=1"]
    blocks = registry.places(2, load_config("nano", "dar-block", shallow).residual)
    assert [place.branches for place in blocks] == [2]
    with pytest.raises(ConfigError, match=r"branches_per_block=4 .* at most 2"):
        registry.places(2, load_config("nano", "dar-block", [*shallow, "residual.branches_per_block=4"]).residual)


def test_a_base_is_found_beside_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "below.yaml").write_text("base: nano\nmodel:\n  layers: 3\n")
    (tmp_path / "mine" / "above.yaml").write_text("base: below.yaml\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("mine/above.yaml", "standard").model.layers == 3


def own_file(folder: Path, train: str, base: str = "nano") -> str:
    """A scale of the user's own."""
    path = folder / "own.yaml"
    path.write_text(f"base: {base}\ntrain: {{{train}}}\n")
    return str(path)


@pytest.mark.parametrize(
    ("tokens", "steps", "warmup"),
    [
        ("3_000_000", 732, 50),
        ("2_000_000", 488, 50),  # the runs of results/ keep the recipe's
        ("819_200", 200, 50),
        ("815_104", 199, 49),
        ("50_000", 12, 3),
        ("4096", 1, 1),
    ],
)
def test_the_warmup_of_a_recipe_takes_at_most_a_quarter_of_the_steps(
    tokens: str, steps: int, warmup: int, tmp_path: Path
):
    shorter = [f"train.tokens={tokens}"]
    config = load_config("nano", "standard", shorter)
    assert (config.steps, config.train.warmup_steps) == (steps, warmup)
    assert load_recipe("nano", config.model, config.residual, shorter) == config
    in_a_file = own_file(tmp_path, f"tokens: {tokens}")
    assert load_config(in_a_file, "standard") == config
    assert load_config(str(CONFIGS / "scale" / "nano.yaml"), "standard", shorter) == config
    note = shortened_warmup(config, "nano", shorter)
    assert (note is None) == (warmup == 50)
    if note is not None:
        assert note.startswith(f"shortened from 50 steps to {warmup}, a quarter of the {steps} steps that train.tokens")
        assert shortened_warmup(config, in_a_file, []) == note


def test_a_warmup_of_the_users_own_is_kept_or_refused(tmp_path: Path):
    assert load_config("nano", "standard", ["train.warmup_steps=12", "train.tokens=50_000"]).train.warmup_steps == 12
    assert load_config(own_file(tmp_path, "warmup_steps: 9, tokens: 50000"), "standard").train.warmup_steps == 9
    for scale, overrides in (
        ("nano", ["train.warmup_steps=50"]),
        ("nano", ["train={warmup_steps: 50}"]),
        (own_file(tmp_path, "warmup_steps: 50"), []),
    ):
        with pytest.raises(ConfigError, match=r"train\.warmup_steps=50 exceeds the 12 steps"):
            load_config(scale, "standard", [*overrides, "train.tokens=50_000"])
    config = load_config("nano", "standard", ["train.warmup_steps=60", "train.tokens=400_000"])
    assert config.train.warmup_steps == 60
    assert shortened_warmup(config, "nano", ["train.warmup_steps=60", "train.tokens=400_000"]) is None


def test_a_train_section_that_is_none():
    with pytest.raises(ConfigError, match="train=5 is not a section"):
        load_config("nano", "standard", ["train=5"])


def test_unknown_names():
    with pytest.raises(ConfigError, match="no scale 'nnn"):
        load_config("n" * 5000, "standard")
    with pytest.raises(ConfigError, match=r"no scale 'nanu': did you mean nano\? use one of 0\.1b"):
        load_config("nanu", "standard")
    with pytest.raises(ConfigError, match=r"no residual 'dar': .*use one of attnres-block"):
        load_config("nano", "dar")


@pytest.mark.parametrize(
    ("text", "says"),
    [("model: [", "is not valid YAML"), ("- 1", "is not a mapping"), ("base: nowhere", "no scale 'nowhere'")],
)
def test_broken_files(tmp_path: Path, text: str, says: str):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(str(path), "standard")


def test_a_file_that_is_its_own_base(tmp_path: Path):
    path = tmp_path / "loop.yaml"
    path.write_text(f"base: {path}\n")
    with pytest.raises(ConfigError, match=r"loop\.yaml is its own base"):
        load_config(str(path), "standard")


def test_python_users_get_the_same_messages():
    with pytest.raises(ConfigError, match=r"model.kv_heads=4 does not divide model.heads=10: use 1, 2, 5 or 10"):
        ModelConfig(layers=2, width=640, heads=10, kv_heads=4, ffn_width=8)
    with pytest.raises(ConfigError, match="at most 4"):
        MoEConfig(experts=4, active=8, expert_width=8)
    with pytest.raises(ConfigError, match="true or false"):
        registry.resolve(ResidualConfig("dar-block", share_parameters="layer"))


@pytest.mark.parametrize(
    ("kind", "fields", "says"),
    [
        (ResidualConfig, {"method": 3}, "residual.method=3 is not text"),
        (ResidualConfig, {"method": "mhc", "branches_per_block": 0}, "residual.branches_per_block=0 .* 1 or more"),
        (ResidualConfig, {"method": "mhc", "streams": {"n": 4}}, "residual.streams=.* is not a single value"),
        (ModelConfig, {"width": "wide"}, "model.width='wide' is not a whole number"),
        (ModelConfig, {"layers": None}, "model.layers=None is not a whole number"),
        (ModelConfig, {"tied_embeddings": "no"}, "model.tied_embeddings='no' is not true or false"),
        (ModelConfig, {"norm_eps": float("nan")}, "model.norm_eps=nan is not a finite number"),
        (ModelConfig, {"moe": 8}, "model.moe=8 is not a section"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_python_users_types_are_checked(kind: type, fields: dict[str, object], says: str):
    complete = {"layers": 2, "width": 32, "heads": 2, "kv_heads": 1, "ffn_width": 8} if kind is ModelConfig else {}
    with pytest.raises(ConfigError, match=says):
        kind(**{**complete, **fields})


def test_numbers_as_text_are_numbers():
    assert registry.resolve(ResidualConfig("mhc", streams="4", gate_scale="3e-4")) == {
        "streams": 4,
        "gate_scale": 3e-4,
        "sinkhorn_steps": 20,
    }


@pytest.mark.parametrize(
    ("text", "number"),
    [("3e-4", 3e-4), ("+30E-5", 3e-4), (".3e-3", 3e-4), ("0.3e-3", 3e-4), ("1.5e3", 1500), ("-2e1", -20)],
)
def test_yaml_numbers_without_a_dot_or_sign_are_numbers(text: str, number: float):
    """YAML 1.1 reads 3e-4 and 1.5e3 as text: two runs with the same option would have different configs."""
    assert load_config("nano", "mhc-2", [f"residual.gate_scale={text}"]).residual.options[0] == ("gate_scale", number)


def test_a_residual_config_is_a_value():
    config = ResidualConfig("mhc", branches_per_block=4, streams=2, gate_scale=0.5)
    assert config == ResidualConfig("mhc", gate_scale=0.5, streams=2, branches_per_block=4, sinkhorn_steps=None)
    assert config != ResidualConfig("mhc", branches_per_block=4, streams=2)
    assert len({config, ResidualConfig(**config.to_dict()), pickle.loads(pickle.dumps(config))}) == 1
    assert config.to_dict() == {"method": "mhc", "branches_per_block": 4, "gate_scale": 0.5, "streams": 2}
    assert dataclasses.replace(config, branches_per_block=2).to_dict() == {**config.to_dict(), "branches_per_block": 2}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.method = "standard"  # type: ignore[misc]


def test_an_experiment_survives_json():
    config = load_config("nano-moe", "mhc-2", ["residual.gate_scale=1e-3", "train.betas=[0.8, 0.9]"])
    assert Config(**json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gate_scal": 1}, "gate_scal=1 is not an option of dar-block .*did you mean residual.gate_scale?"),
        ({"branch_per_block": 4}, "did you mean residual.branches_per_block?"),
        ({"options": {"gate_scale": 1}}, "not a single value"),
        ({"gate_scale": [1, 2]}, r"gate_scale=\(1, 2\) is not a finite number"),
    ],
    ids=str,
)
def test_unknown_options(given: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        registry.resolve(ResidualConfig("dar-block", **given))

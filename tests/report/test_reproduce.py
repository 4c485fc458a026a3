"""The command that reproduces a config: shipped configs plus overrides give the config back."""

import dataclasses
import shlex

import pytest
import yaml

from dualres.config.loading import load_config, names
from dualres.config.schema import Config
from dualres.report.reproduce import Origin, as_override, as_yaml, command, differing, origin, settings
from tests.train.tiny import tiny_config

OVERRIDES = {
    "as it ships": [],
    "recipe": [
        *("train.seed=7", "train.tokens=40e9", "train.learning_rate=1e-5", "train.min_learning_rate=1e-6"),
        *("train.betas=[0.8, 0.9]", "train.compile=max-autotune", "train.dataset='null'"),
    ],
    "block": ["residual.branches_per_block=3"],
    "model": ["model.context=128", "model.attention_bias=qkv", "model.rope_scaling={kind: linear, factor: 2}"],
}


@pytest.mark.parametrize("overrides", OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("scale", names("scale"))
def test_it_leads_back_to_the_config(scale: str, overrides: list[str]):
    for residual in names("residual"):
        config = load_config(scale, residual, overrides)
        found = origin(config)
        assert found is not None
        assert (found.scale, found.residual) == (scale, residual)
        assert load_config(*found) == config
        assert len(found.overrides) <= len(overrides) + 4  # a section has five values
        assert found.changes("model") == any(override.startswith("model.") for override in overrides)


def test_an_option_that_only_the_shipped_config_has_is_unset():
    config = load_config("nano", "mhc-2", ["residual.streams=null"])
    found = origin(config)
    assert found is not None
    assert found.overrides == ("residual.streams=null",)
    assert load_config(*found) == config


def test_the_command_is_what_a_shell_reads():
    config = load_config("nano", "mhc-2", ["train.dataset='two words'", "train.seed=1"])
    found = origin(config)
    assert found is not None
    text = command(found, "my data/novels")
    assert text.splitlines()[0] == r"dualres train nano mhc-2 --data 'my data/novels' \ "[:-1]
    words = shlex.split(text.replace("\\\n", ""))
    sets = [words[number + 1] for number, word in enumerate(words) if word == "--set"]
    assert load_config(words[2], words[3], sets) == config
    assert command(found, "d", processes=8).startswith("torchrun --nproc-per-node 8 -m dualres train nano mhc-2")


def test_a_model_between_the_scales_is_told_from_the_nearest():
    found = origin(tiny_config("dar-block"))
    assert found is not None
    assert (found.scale, found.residual) == ("nano", "dar-block")
    assert "model.layers=2" in found.overrides
    moe = origin(tiny_config("dar-block", "moe"))
    assert moe is not None
    assert moe.scale == "nano-moe"


def test_the_model_decides_and_not_the_recipe():
    recipe = load_config("nano", "standard", ["train.warmup_steps=10"]).train
    config = dataclasses.replace(load_config("1b", "standard"), train=recipe)
    found = origin(config)
    assert found is not None
    assert found.scale == "1b"
    assert len(found.overrides) > 8  # nano with another model would take fewer


def test_a_warmup_that_a_short_run_would_not_have():
    """Set to the recipe's, although the run is short; an override says so."""
    short = ["train.tokens=400_000"]
    assert origin(load_config("nano", "standard", short)) == (
        "nano",
        "standard",
        ("train.tokens=400000", "train.warmup_steps=24"),
    )
    found = origin(load_config("nano", "standard", [*short, "train.warmup_steps=50"]))
    assert found == ("nano", "standard", ("train.tokens=400000", "train.warmup_steps=50"))


def test_where_none_leads_to_it():
    config = load_config("nano", "dar-block")
    own = dataclasses.replace(config, residual=dataclasses.replace(config.residual, method="my-method"))
    assert origin(own) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[(1e-06, "1e-06"), (None, "null"), (True, "true"), ((0.9, 0.95), "[0.9, 0.95]"), ("bf16", "bf16")],
        *[("off", '"off"'), ("null", '"null"'), ("1e3", '"1e3"'), ("a b", '"a b"'), ('"', r'"\""'), ("", '""')],
    ],
)
def test_values_as_overrides_have_them(value: object, text: str):
    assert as_override(value) == text


def test_what_tells_settings_apart():
    def each(*several: dict[str, object]) -> list[str]:
        return [differing(own, several) for own in several]

    assert each({"train.tokens": 1, "model.layers": 2}, {"train.tokens": 3, "model.layers": 2}) == [
        *("tokens=1", "tokens=3")
    ]
    assert each({"a": 1}) == [""]
    assert each({"a": 1}, {"a": 1.0}) == ["a=1", "a=1.0"]
    assert each({"model.moe": None}, {"model.moe.experts": 8}) == ["moe.experts=null", "moe.experts=8"]


def test_the_yaml_is_the_whole_config():
    config = load_config("nano-moe", "dar-block")
    found = yaml.safe_load(as_yaml(config))
    assert Config(**found) == config
    assert settings(config)["model.moe.experts"] == 8
    assert Origin("a", "b", ("model.layers=2",)).changes("model")

"""The paper's recipe: who decays, and the learning rate of every step."""

import itertools
import math
from typing import Any

import pytest

from dualres.config import ResidualConfig
from dualres.experiment import load_config
from dualres.model.decoder import build_decoder
from dualres.train.recipe import adamw, learning_rate, optimizer_groups, steps_of
from tests.small import FEEDFORWARDS, RESIDUALS, model_config

METHODS = {**RESIDUALS, "attnres-vproj-lowrank": ResidualConfig("attnres-vproj", value_rank=4)}


@pytest.mark.parametrize("feedforward", FEEDFORWARDS)
@pytest.mark.parametrize("residual", METHODS)
def test_matrices_decay_and_nothing_else(residual: str, feedforward: str):
    decoder = build_decoder(model_config(feedforward), METHODS[residual], device="meta")
    names = {id(p): name for name, p in decoder.named_parameters()}
    groups: list[dict[str, Any]] = optimizer_groups(decoder, 0.1)
    decaying, others = ({names[id(p)] for p in group["params"]} for group in groups)
    assert decaying | others == set(names.values())
    assert not decaying & others
    for name in names.values():
        matrix = ".module." in name or name.startswith("vocabulary.") or ".maps." in name
        assert (name in decaying) == matrix, name


@pytest.mark.parametrize("scale", ["0.1b", "1b", "moe-7b"])
def test_the_paper_recipe(scale: str):
    train = load_config(scale, "dar-block").train
    optimizer = adamw(build_decoder(model_config(), RESIDUALS["dar-block"]), train)
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.95), 1e-8, decay)
    assert train.clip == 1.0
    assert train.seed == 42
    assert train.min_learning_rate == pytest.approx(train.learning_rate / 10)


def test_moe_schedule():
    """60,000 steps: a linear rise over 2,000, then half a cosine to a tenth at the last."""
    config = load_config("moe-7b", "dar-block")
    steps = steps_of(config.train, config.model.context)
    assert steps == 60_000
    rates = [learning_rate(step, steps, config.train) for step in range(steps)]
    assert rates[:2] == pytest.approx([3e-4 / 2000, 2 * 3e-4 / 2000])
    assert max(rates) == rates[1999] == rates[2000] == 3e-4
    assert rates[-1] == pytest.approx(3e-5)
    assert all(a > b for a, b in itertools.pairwise(rates[2000:]))
    middle = 2000 + (steps - 1 - 2000) // 4
    wanted = 3e-5 + (3e-4 - 3e-5) * (1 + math.cos(math.pi / 4)) / 2
    assert rates[middle] == pytest.approx(wanted, rel=1e-4)


def test_no_warmup_and_one_step():
    config = load_config("nano", "standard", ["train.tokens=4096", "train.warmup_steps=0"])
    assert steps_of(config.train, config.model.context) == 1
    assert learning_rate(0, 1, config.train) == config.train.learning_rate

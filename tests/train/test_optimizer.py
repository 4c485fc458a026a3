"""The paper's recipe: who decays, and the learning rate of every step."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dualres
from dualres.config.loading import load_config
from dualres.config.schema import ResidualConfig
from dualres.data.loader import Loader
from dualres.data.shards import read_index
from dualres.hub.open_model import open_model
from dualres.model.block import residual_stack
from dualres.model.decoder import build_decoder
from dualres.train.optimizer import adamw, learning_rate, optimizer_groups
from tests.small import FEEDFORWARDS, RESIDUALS, model_config, relative_error
from tests.train.tiny import rows, tiny_config, train_tiny

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


class OwnModel(nn.Module):
    """A user's model: one of everything whose role its shape does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.embedding = nn.Embedding(7, 8)
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
        attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
        branches: list[nn.Module] = [attention, nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))] * 2
        self.stack = residual_stack(branches, 8, "dar-block")
        self.recurrent = nn.GRU(8, 8)
        self.grid_norm, self.batch_norm = nn.LayerNorm((5, 8)), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embedding.weight  # tied
        self.probe = nn.Linear(8, 2).requires_grad_(False)


def test_what_decays_in_a_model_of_your_own():
    model = OwnModel()
    names = {id(p): name for name, p in model.named_parameters()}
    decaying, others = optimizer_groups(model, 0.1)
    assert (decaying["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    inside = "stack.blocks.0.branches"
    assert sorted(names[id(p)] for p in decaying["params"]) == [
        "embedding.weight",  # once, although tied
        "patches.weight",
        "recurrent.weight_hh_l0",
        "recurrent.weight_ih_l0",
        f"{inside}.0.in_proj_weight",
        f"{inside}.0.out_proj.weight",
        f"{inside}.1.1.weight",
    ]
    trained = [name for name in names.values() if not name.startswith("probe")]
    assert len(decaying["params"]) + len(others["params"]) == len(trained)
    torch.optim.AdamW(dualres.optimizer_groups(model, 0.1), lr=1e-3)


def test_a_module_may_declare_its_matrices():
    class Experts(nn.Module):
        matrices = ("up",)

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(2, 3, 4))
            self.mix_weight = nn.Parameter(torch.zeros(3, 4))
            self.inner = nn.Linear(4, 4, bias=False)

    experts = Experts()
    decaying, others = optimizer_groups(experts, 0.1)
    assert [p.shape for p in decaying["params"]] == [experts.up.shape, experts.inner.weight.shape]
    assert [p.shape for p in others["params"]] == [experts.mix_weight.shape]


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
    steps = config.steps
    assert steps == 60_000
    rates = [learning_rate(step, steps, config.train) for step in range(steps)]
    assert rates[:2] == pytest.approx([3e-4 / 2000, 2 * 3e-4 / 2000])
    assert max(rates) == rates[1999] == rates[2000] == 3e-4
    assert rates[-1] == pytest.approx(3e-5)
    assert all(a > b for a, b in itertools.pairwise(rates[2000:]))
    middle = 2000 + (steps - 1 - 2000) // 4
    wanted = 3e-5 + (3e-4 - 3e-5) * (1 + math.cos(math.pi / 4)) / 2
    assert rates[middle] == pytest.approx(wanted, rel=1e-4)


def test_the_schedule_ends_at_its_minimum():
    """Twenty steps, where being one late shows."""
    changes = ["train.tokens=20_480", "train.global_batch=4", "train.micro_batch=4", "train.warmup_steps=4"]
    config = load_config("nano", "standard", changes)
    steps = config.steps
    assert steps == 20
    rates = [learning_rate(step, steps, config.train) for step in range(steps)]
    peak, least = config.train.learning_rate, config.train.min_learning_rate
    decay = [least + (peak - least) * (1 + math.cos(math.pi * n / 15)) / 2 for n in range(16)]
    assert rates == pytest.approx([peak * n / 4 for n in (1, 2, 3, 4)] + decay, rel=1e-12)


def test_a_run_is_the_recipe(data: Path, tmp_path: Path):
    """Five steps by hand: gradients of the whole batch, clipped at 0.5, the rates of the schedule, AdamW.

    The queries are the worst, at 3e-5: they start at zero, and Adam divides their small gradients by their own size.
    Without decay the matrices are off by 9e-4.
    """
    config = tiny_config(train__tokens=5 * 4 * 32, train__warmup_steps=2, train__clip=0.5)
    train_tiny(config, data, tmp_path / "run")
    decoder = build_decoder(config.model, config.residual, seed=42)
    loader = Loader(data, read_index(data), "train", 32, 42)
    decaying = [p for name, p in decoder.named_parameters() if ".module." in name or name.startswith("vocabulary.")]
    others = [p for p in decoder.parameters() if all(p is not matrix for matrix in decaying)]
    optimizer = torch.optim.AdamW([{"params": decaying, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}])
    rates = [1.5e-3, 3e-3, 3e-3, 1.65e-3, 3e-4]  # half the peak, the peak, then half a cosine of three points
    found = []
    for step, rate in enumerate(rates):
        batch = loader.batch(4 * step, 4)
        loss = torch.nn.functional.cross_entropy(decoder(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in decoder.parameters() if p.grad is not None]
        norm = torch.cat([gradient.flatten() for gradient in gradients]).norm()
        assert norm > 0.5  # else clipping is not shown
        for group in optimizer.param_groups:
            group.update(lr=rate, betas=(0.9, 0.95), eps=1e-8)
        for gradient in gradients:
            gradient *= 0.5 / norm
        optimizer.step()
        found.append((loss.item(), norm.item()))
    ran = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path / "run") if "loss" in row]
    assert ran == [pytest.approx(values, rel=1e-5) for values in found]
    trained = open_model(tmp_path / "run").decoder
    for (name, ours), theirs in zip(trained.named_parameters(), decoder.parameters(), strict=True):
        assert relative_error(ours, theirs) < 1e-4, name


def test_no_warmup_and_one_step():
    config = load_config("nano", "standard", ["train.tokens=4096", "train.warmup_steps=0"])
    assert config.steps == 1
    assert learning_rate(0, 1, config.train) == config.train.learning_rate

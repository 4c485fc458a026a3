"""The sparse feed-forward: its auxiliary loss and that loss' gradient, its experts, its router's precision."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.functional import linear, silu

from dualres.config.schema import ResidualConfig
from dualres.model.attention import Context, RouterReport
from dualres.model.decoder import Decoder
from dualres.model.moe import Experts, LocalExperts, MoE, router_logits
from tests.small import (
    MOE,
    RESIDUALS,
    gradients,
    model_config,
    next_token_loss,
    random_tokens,
    relative_error,
    stirred,
)

EXPERTS, WIDTH, TOKENS = 6, 32, 39
# Without mHC: its first branch mixes equal streams, and the gradient of that is nothing but rounding.
SOME_RESIDUALS = {name: RESIDUALS[name] for name in ("standard", "attnres-full", "dar-block", "dar-crossv")}


def moe_alone(active: int = 2, dtype: torch.dtype = torch.float32) -> MoE:
    moe = MoE(WIDTH, 24, EXPERTS, active, aux_coefficient=0.0, layer=0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return moe.to(dtype)


def context(report: RouterReport | None = None) -> Context:
    return Context(torch.empty(0), torch.empty(0), report=report)  # no attention here, so no rotary tables


def route_by_input(moe: MoE) -> None:
    """Let the first E entries of a token be its router logits."""
    with torch.no_grad():
        moe.router.weight.copy_(torch.eye(moe.experts, WIDTH))


def routed_tokens(favorites: list[tuple[int, ...]]) -> Tensor:
    """Token n prefers the experts `favorites[n % len]`, in this order, to all others. -> (3,13,D)"""
    tokens = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    for n in range(TOKENS):
        for rank, expert in enumerate(favorites[n % len(favorites)]):
            tokens[n, expert] = 5.0 - rank / 2
    return tokens.view(3, TOKENS // 3, WIDTH)


def numpy_aux(tokens: Tensor, router: Tensor, active: int) -> float:
    """E · Σ_e f_e P_e in float64."""
    x = tokens.detach().double().numpy().reshape(-1, WIDTH)
    logits = x @ router.detach().double().numpy().T
    experts = logits.shape[1]
    chosen = np.argsort(-logits, axis=1)[:, :active]
    share = np.bincount(chosen.ravel(), minlength=experts) / chosen.size
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    probability = (exponentials / exponentials.sum(1, keepdims=True)).mean(0)
    return float(experts * np.sum(share * probability))


def moes(decoder: Decoder) -> list[MoE]:
    return [module for module in decoder.modules() if isinstance(module, MoE)]


def watch_inputs(decoder: Decoder) -> list[tuple[MoE, Tensor]]:
    """What each MoE layer is given, in order, once the decoder has run."""
    seen: list[tuple[MoE, Tensor]] = []

    def watch(moe: Any, args: Any) -> None:
        seen.append((moe, args[0]))

    for moe in moes(decoder):
        moe.register_forward_pre_hook(watch)
    return seen


# The auxiliary loss

ROUTINGS: dict[str, tuple[list[tuple[int, ...]], int]] = {  # favorites of the tokens, active experts
    "one pair takes all": ([(4, 1)], 2),
    "one expert takes all": ([(4,)], 1),
    "uniform": ([(0, 3), (4, 1), (2, 5)], 2),
    "uneven": ([(0, 1), (2, 0), (5, 0), (5, 2)], 2),
    "three active": ([(0, 1, 2), (2, 0, 5)], 3),
}


@pytest.mark.parametrize(("favorites", "active"), ROUTINGS.values(), ids=ROUTINGS)
def test_aux_of_hand_set_routing(favorites, active):
    moe, report = moe_alone(active), RouterReport()
    route_by_input(moe)
    tokens = routed_tokens(favorites)
    moe(tokens, context(report))
    wanted = numpy_aux(tokens, moe.router.weight, active)
    assert abs(float(report.losses[0]) / wanted - 1) < 1e-6


HARD = 50.0  # a logit so large that softmax over all experts gives the favorites everything
UNEVEN = torch.tensor([4.0, 3.0, 1.0, 0.0, 2.0, 0.5])
KNOWN = {
    "uniform assignments": (torch.stack([(1 + e) * UNEVEN.roll(e) for e in range(EXPERTS)]), 1.0),
    "uniform probabilities": (torch.zeros(7, EXPERTS), 1.0),
    "all to two experts": (torch.tensor([[HARD, 0, 0, HARD, 0, 0]]), EXPERTS / 2),
    "all to two, three times as probable": (torch.tensor([[HARD + np.log(3), 0, 0, HARD, 0, 0]]), EXPERTS / 2),
    "half to two, half to other two": (torch.tensor([[HARD, 0, 0, HARD, 0, 0], [0, HARD, HARD, 0, 0, 0]]), EXPERTS / 4),
}


@pytest.mark.parametrize(("logits", "wanted"), KNOWN.values(), ids=KNOWN)
def test_aux_known_by_heart(logits, wanted):
    moe, report = moe_alone(), RouterReport()
    route_by_input(moe)
    tokens = torch.zeros(1, len(logits), WIDTH)
    tokens[0, :, :EXPERTS] = logits
    moe(tokens, context(report))
    assert abs(float(report.losses[0]) - wanted) < 1e-6


@pytest.mark.parametrize("residual", SOME_RESIDUALS.values(), ids=SOME_RESIDUALS)
def test_aux_of_every_layer_of_a_model(residual):
    decoder, report = stirred(model_config("moe"), residual), RouterReport()
    seen = watch_inputs(decoder)
    decoder(random_tokens(), report=report)
    wanted = [numpy_aux(x, moe.router.weight, moe.active) for moe, x in seen]
    assert list(report.losses) == list(range(5))
    assert [float(loss) for loss in report.losses.values()] == pytest.approx(wanted, rel=1e-5)
    assert float(report.mean()) == pytest.approx(sum(wanted) / 5, rel=1e-5)
    assert not report.mean().requires_grad


# Its gradient


def differentiable_aux(moe: MoE, tokens: Tensor) -> Tensor:
    probability = (tokens.flatten(0, 1) @ moe.router.weight.T).softmax(-1)  # (N,E)
    chosen = probability.argsort(descending=True)[:, : moe.active]
    share = torch.stack([(chosen == e).sum() / chosen.numel() for e in range(moe.experts)])
    return moe.experts * (share * probability.mean(0)).sum()


def moe_decoder(residual: ResidualConfig, aux_coefficient: float, dtype: torch.dtype = torch.float32) -> Decoder:
    config = model_config("moe", moe=dataclasses.replace(MOE, aux_coefficient=aux_coefficient))
    return stirred(config, residual).to(dtype)


@pytest.mark.parametrize("scale", [None, 1.0, 0.25], ids=["no report", "scale 1", "scale 1/4"])
@pytest.mark.parametrize("residual", SOME_RESIDUALS.values(), ids=SOME_RESIDUALS)
def test_attached_gradient_is_that_of_the_sum_over_layers(residual, scale):
    # In float64, since the gradients of gates sum terms that cancel.
    coefficient, tokens = 0.5, random_tokens()
    report = None if scale is None else RouterReport(scale)
    ours = moe_decoder(residual, coefficient, torch.float64)
    next_token_loss(ours(tokens, report=report), tokens).backward()

    plain = moe_decoder(residual, 0.0, torch.float64)
    seen = watch_inputs(plain)
    language = next_token_loss(plain(tokens), tokens)
    aux = torch.stack([differentiable_aux(moe, x) for moe, x in seen]).sum()
    names, parameters = zip(*plain.named_parameters(), strict=True)
    of_language = torch.autograd.grad(language, parameters, retain_graph=True)
    of_aux = torch.autograd.grad(aux, parameters, allow_unused=True, materialize_grads=True)

    found = gradients(ours)
    for name, a, b in zip(names, of_language, of_aux, strict=True):
        wanted = a + coefficient * (1.0 if scale is None else scale) * b
        assert relative_error(found[name], wanted) < 1e-10, name
    assert all(b.abs().sum() > 0 for name, b in zip(names, of_aux, strict=True) if "router" in name)


def test_aux_does_not_enter_the_output_or_a_pass_without_gradient():
    tokens, report = random_tokens(), RouterReport()
    with_aux, without = (moe_decoder(RESIDUALS["standard"], c) for c in (0.5, 0.0))
    assert torch.equal(with_aux(tokens), without(tokens))
    with torch.no_grad():
        assert torch.equal(with_aux(tokens, report=report), without(tokens))
    assert len(report.losses) == 5


@pytest.mark.parametrize("residual", RESIDUALS.values(), ids=RESIDUALS)
def test_aux_counts_once_under_checkpointing(residual):
    plain, recomputed = moe_decoder(residual, 0.5), moe_decoder(residual, 0.5)
    blocks = recomputed.stack.blocks
    for i in range(len(blocks)):
        blocks[i] = checkpoint_wrapper(blocks[i])
    tokens, reports, runs = random_tokens(), [], []
    moes(recomputed)[0].register_forward_pre_hook(lambda *_: runs.append(1))
    for decoder in (plain, recomputed):
        reports.append(RouterReport(scale=0.5))
        next_token_loss(decoder(tokens, report=reports[-1]), tokens).backward()
    wanted = gradients(plain)
    found = {name.replace("_checkpoint_wrapped_module.", ""): g for name, g in gradients(recomputed).items()}
    assert len(runs) == 2, "the first layer was not computed again"
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert relative_error(found[name], wanted[name]) < 1e-6, name
    assert [len(report.losses) for report in reports] == [5, 5]
    assert torch.equal(reports[0].mean(), reports[1].mean())


# The experts


def token_by_token(moe: MoE, tokens: Tensor) -> Tensor:
    """Σ_{e in top-k} p_e · W_down,e (silu(W_gate,e x) ⊙ W_up,e x), one token at a time."""
    out = []
    for x in tokens.flatten(0, -2):
        logits = moe.router.weight @ x
        best = sorted(range(moe.experts), key=logits.tolist().__getitem__, reverse=True)[: moe.active]
        weights = logits[best].softmax(0)
        for weight, expert in zip(weights, best, strict=True):
            gate, up = (moe.gate_up[expert] @ x).chunk(2)
            out.append(weight * (moe.down[expert] @ (silu(gate) * up)))
    return torch.stack(out).unflatten(0, (-1, moe.active)).sum(1).view_as(tokens)


# bf16: the product, silu ⊙ up, the second product and the weighted sum are each rounded to 8 bits, a relative RMS of
# about 1.7e-3 every time, hence some 4e-3 together (measured: 4.2e-3 at most); the backward pass adds roundings of its
# own (5.3e-3 at most).
FORWARD = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 5e-3}
BACKWARD = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2}
LOADS: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "as it comes": ([()], 2),
    "all to one": ([(4,)], 1),
    "all to two": ([(4, 1)], 2),
    "first and last idle": ([(1, 2), (3, 4)], 2),
    "one in the middle idle": ([(0, 1), (2, 4), (5, 0)], 2),
    "all active": ([()], EXPERTS),
}


@pytest.mark.parametrize("dtype", FORWARD, ids=str)
@pytest.mark.parametrize(("favorites", "active"), LOADS.values(), ids=LOADS)
def test_no_token_is_dropped(favorites, active, dtype):
    moe = moe_alone(active, dtype=dtype)
    route_by_input(moe)
    tokens = routed_tokens(favorites).to(dtype).requires_grad_()
    pull = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    exact = moe_alone(active, dtype=torch.float64)
    exact.load_state_dict(moe.state_dict())
    exact_tokens = tokens.detach().double().requires_grad_()

    found, wanted = moe(tokens, context()), token_by_token(exact, exact_tokens)
    assert found.dtype == dtype
    assert relative_error(found, wanted) < FORWARD[dtype]

    found.backward(pull)
    wanted.backward(pull.double())
    for ours, theirs in [(tokens, exact_tokens), *zip(moe.parameters(), exact.parameters(), strict=True)]:
        assert ours.grad is not None
        assert theirs.grad is not None
        assert relative_error(ours.grad, theirs.grad) < BACKWARD[dtype]


# The router's precision


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_router_decides_in_float32_under_autocast(dtype, monkeypatch):
    moe = moe_alone().to(dtype)
    tokens = torch.randn(1, 5000, WIDTH, generator=torch.Generator().manual_seed(4)).to(dtype)
    decided = []
    mix = moe.mix_experts

    def record(tokens, weights, chosen, assigned):
        decided.append((weights, chosen))
        return mix(tokens, weights, chosen, assigned)

    monkeypatch.setattr(moe, "mix_experts", record)
    moe(tokens, context())
    with torch.autocast("cpu", torch.bfloat16):
        moe(tokens, context())
        rounded = linear(tokens[0], moe.router.weight).topk(2).indices
    (weights, chosen), (cast_weights, cast_chosen) = decided
    assert not torch.equal(rounded, chosen), "these tokens cannot tell float32 from bfloat16"
    assert torch.equal(cast_chosen, chosen)
    assert torch.equal(cast_weights, weights)
    assert torch.equal(chosen, (tokens[0].double() @ moe.router.weight.double().T).topk(2).indices)
    assert weights.dtype == torch.float32


def test_router_logits_keep_float64():
    tokens, weight = torch.randn(5, WIDTH, dtype=torch.float64), torch.randn(EXPERTS, WIDTH, dtype=torch.float64)
    assert torch.equal(router_logits(tokens, weight), tokens @ weight.T)


class Counting(LocalExperts):
    """Looks at the counts, as experts on other ranks need it: a compiler has to leave off there and begin anew."""

    def apply(self, experts: Experts, rows: Tensor, assigned: Tensor) -> Tensor:
        assigned.tolist()
        return experts(rows, assigned)


def test_compiled_in_pieces_the_auxiliary_gradient_is_there():
    found = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        moe = moe_alone()
        moe.aux_coefficient, moe.placement = 1.0, Counting()
        run = torch.compile(moe, backend="aot_eager") if compiled else moe
        run(torch.randn(2, 7, WIDTH, generator=torch.Generator().manual_seed(2)), context=context()).sum().backward()
        assert moe.router.weight.grad is not None
        found[compiled] = moe.router.weight.grad
    assert relative_error(found[True], found[False]) < 1e-5

"""Mixture of experts: every token is routed to its top k of E experts, and no token is dropped."""
# B batch  T tokens  N = B·T  D width  E experts  k active experts  F expert width

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, one_hot, silu

from dualres.model.attention import Context
from dualres.ops import grouped_linear, no_autocast, product_dtype
from dualres.ops.grouped import register_flop_formulas

Experts = Callable[[Tensor, Tensor], Tensor]  # rows grouped by expert, number of rows of each -> rows


class LocalExperts:
    """All tokens of a micro-batch and all experts are in this process; see `ExpertParallel` for several processes."""

    shards = 1  # equal shards of the micro-batch

    def total(self, assigned: Tensor) -> Tensor:
        """The assignments summed over all shards of the micro-batch. (E,) -> (E,)"""
        return assigned

    def apply(self, experts: Experts, rows: Tensor, assigned: Tensor) -> Tensor:
        """Send rows, grouped by expert, through their experts, on whichever rank they are. (M,D), (E,) -> (M,D)"""
        return experts(rows, assigned)

    def own(self, weight: Tensor) -> Tensor:
        """This process's experts."""
        return weight


class MoE(nn.Module):
    """Σ_{e in top-k} p_e · expert_e(x), with p the softmax over the k largest router logits.

    The auxiliary loss E·Σ_e f_e P_e (f_e: fraction of the N·k assignments, P_e: mean router probability; 1 if routing
    is uniform) is attached to p: its gradient flows with p's, although no returned loss contains it.
    """

    matrices = ("gate_up", "down")  # subject to weight decay, like the weights of `nn.Linear`

    def __init__(self, width: int, hidden: int, experts: int, active: int, aux_coefficient: float, layer: int):
        super().__init__()
        register_flop_formulas()
        self.experts, self.active, self.aux_coefficient, self.layer = experts, active, aux_coefficient, layer
        self.router = nn.Linear(width, experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, width))  # rows of the gate, then of the up map
        self.down = nn.Parameter(torch.empty(experts, width, hidden))
        self.placement = LocalExperts()
        self.reset_parameters()

    def reset_parameters(self, generator: torch.Generator | None = None, std: float = 0.02) -> None:
        """The experts' weights N(0, std)."""
        nn.init.normal_(self.gate_up, std=std, generator=generator)
        nn.init.normal_(self.down, std=std, generator=generator)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        """(B,T,D) -> (B,T,D)"""
        tokens = x.flatten(0, -2)  # (N,D)
        logits = router_logits(tokens, self.router.weight)  # (N,E)
        best, chosen = logits.topk(self.active, -1)  # (N,k)
        assigned = one_hot(chosen, self.experts).sum((0, 1))  # (E,) assignments of each expert
        weights = best.softmax(-1)  # (N,k)

        everywhere = self.placement.total(assigned)
        loss = self.experts * (everywhere / everywhere.sum() * logits.softmax(-1).mean(0)).sum()  # mean over shards
        report = context.report
        if report is not None:
            report.losses[self.layer] = loss.detach() if report.attached else loss
        if torch.is_grad_enabled() and (report is None or report.attached):
            scale = 1.0 if report is None else report.scale
            weights = AttachLoss.apply(weights, loss * (self.aux_coefficient * scale / self.placement.shards))
        return self.mix_experts(tokens, weights, chosen, assigned).view_as(x)

    def mix_experts(self, tokens: Tensor, weights: Tensor, chosen: Tensor, assigned: Tensor) -> Tensor:
        """Sort the N·k assignments by expert, run each expert on its rows, sum per token. -> (N,D)"""
        order = chosen.flatten().argsort(stable=True)  # (N·k,) assignment n·k + slot, grouped by expert
        rows = tokens.to(product_dtype(tokens)).repeat_interleave(self.active, 0)[order]
        out = self.placement.apply(self.run_experts, rows, assigned)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        slots = out[back].unflatten(0, (-1, self.active))  # (N,k,D)
        return (slots * weights.unsqueeze(-1)).sum(1).to(tokens.dtype)

    def run_experts(self, rows: Tensor, assigned: Tensor) -> Tensor:
        """The experts of this process, each on its rows. (M,D), (local experts,) -> (M,D)"""
        gate_up, down = (self.placement.own(weight).to(rows.dtype) for weight in (self.gate_up, self.down))
        gate, up = grouped_linear(rows, gate_up, assigned).chunk(2, -1)
        return grouped_linear(silu(gate) * up, down, assigned)


@no_autocast
def router_logits(tokens: Tensor, weight: Tensor) -> Tensor:
    """Router logits in at least float32: rounding could change the selected experts. (N,D), (E,D) -> (N,E)"""
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    return linear(tokens.to(dtype), weight.to(dtype))


class AttachLoss(torch.autograd.Function):
    """The identity of a tensor; its backward pass also gives `loss` the gradient 1."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor) -> Tensor:
        """A copy of x: a compiler may drop the backward pass of a view."""
        return x.clone()

    @staticmethod
    def setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad, torch.ones_like(loss)

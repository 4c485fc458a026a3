"""The training objective: mean next-token cross-entropy, without ever materializing all logits."""
# B batch  T tokens  D width  V vocabulary

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from dualres.model.attention import RouterReport
from dualres.model.decoder import Decoder
from dualres.ops import product_dtype

CrossEntropy = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # hidden, weight, targets, rows at a time -> the mean
# The log-partition and the target's logit in this rank's range of the vocabulary -> in the whole vocabulary
ReduceOverRanks = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Objective(nn.Module):
    """A decoder with its loss in one module, so that FSDP2 sees the output weights used inside a `forward`.

    Logits are computed for `loss_rows` tokens at a time. With `end_of_text`, tokens attend only within their document;
    without it they attend to the whole sequence, across the documents packed into it.
    """

    def __init__(
        self,
        decoder: Decoder,
        loss_rows: int,
        end_of_text: int | None = None,
        cross_entropy: CrossEntropy | None = None,
    ):
        super().__init__()
        self.decoder, self.loss_rows, self.end_of_text = decoder, loss_rows, end_of_text
        self.cross_entropy = cross_entropy or chunked_cross_entropy

    def forward(self, sequences: Tensor, report: RouterReport | None = None) -> Tensor:
        """The mean over all predicted tokens, in nats. (B,T+1) -> ()"""
        tokens = sequences[:, :-1]
        return self.loss(self.decoder.hidden(tokens, documents=self.documents(tokens), report=report), sequences)

    def documents(self, tokens: Tensor) -> Tensor | None:
        """The document number of each token if documents are isolated, else None. (B,T) -> (B,T)"""
        return None if self.end_of_text is None else document_numbers(tokens, self.end_of_text)

    def loss(self, hidden: Tensor, sequences: Tensor) -> Tensor:
        """The loss of normalized hidden states. (B,T,D), (B,T+1) -> ()"""
        rows, weight = self.decoder.vocabulary.output_product(hidden)
        return self.cross_entropy(rows, weight, sequences[:, 1:], self.loss_rows)


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """mean_n −log softmax(hidden_n · weightᵀ)[target_n], with the logits of `rows` tokens at a time.

    hidden (…,D), weight (V,D), targets (…) -> (), in float32 at least. Products run in the dtype of `hidden`, or
    autocast's; softmax and sums in float32. (PyTorch's `linear_cross_entropy` rounds the loss to bfloat16.)
    """
    dtype = product_dtype(hidden)
    hidden, weight = hidden.to(dtype), weight.to(dtype)
    return ChunkedCrossEntropy.apply(hidden.flatten(0, -2), weight, targets.flatten(), rows)


class ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk, while the logits exist."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        """hidden (N,D), weight (V,D), targets (N) -> ()"""
        loss, *gradients = loss_and_gradients(hidden, weight, targets, rows, differentiated=any(ctx.needs_input_grad))
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        others = (None,) * (len(ctx.needs_input_grad) - 2)
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad.to(grad_weight.dtype), *others


def loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    rows: int,
    *,
    differentiated: bool,
    inside: Tensor | None = None,
    reduce_over_ranks: ReduceOverRanks | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The mean of −log p[target], p = softmax(h Wᵀ), and dh = (p − onehot) W / N, dW = (p − onehot)ᵀ h / N.

    hidden (N,D), weight (V,D), targets (N) -> (), (N,D), (V,D). If W is a range of the vocabulary, `inside` (N) marks
    the targets in it, and `reduce_over_ranks` combines the ranges of all ranks.
    """
    precise = torch.promote_types(hidden.dtype, torch.float32)
    present = torch.ones_like(targets, dtype=torch.bool) if inside is None else inside
    present, target = present[:, None], targets[:, None]
    grad_hidden = torch.empty_like(hidden) if differentiated else None
    grad_weight: Tensor | None = None
    total = torch.zeros((), dtype=precise, device=hidden.device)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        logits = hidden[part] @ weight.T  # (rows,V)
        error = logits.softmax(-1, dtype=precise)  # p − onehot, once the target is subtracted
        # log Σ exp(x) = max x − log max p: with `logsumexp`, every logit would be exponentiated twice.
        log_partition = logits.amax(-1, keepdim=True).to(precise) - error.amax(-1, keepdim=True).log()
        target_logit = logits.gather(-1, target[part]).to(precise).where(present[part], 0)
        del logits
        if reduce_over_ranks is not None:
            own = log_partition
            log_partition, target_logit = reduce_over_ranks(own, target_logit)
            error *= (own - log_partition).exp()
        total += (log_partition - target_logit).sum()
        if grad_hidden is None:
            continue
        error.scatter_add_(-1, target[part], -present[part].to(precise))
        error = error.to(hidden.dtype)
        torch.mm(error, weight, out=grad_hidden[part])
        grad_weight = plus_product(grad_weight, error.T, hidden[part], precise)
    if grad_hidden is None or grad_weight is None:
        return total / len(hidden), None, None
    return total / len(hidden), grad_hidden.div_(len(hidden)), grad_weight.div_(len(hidden)).to(weight.dtype)


def plus_product(total: Tensor | None, a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """total + a b in `dtype`, in place if the dtypes agree. (V,D), (V,rows), (rows,D) -> (V,D)"""
    if total is None:
        return (a @ b).to(dtype)
    return total.addmm_(a, b) if a.dtype == dtype else total.add_(a @ b)


def document_numbers(tokens: Tensor, end_of_text: int) -> Tensor:
    """0 up to and including the first end of text, then 1, … (B,T) -> (B,T)"""
    ends = tokens == end_of_text
    return ends.cumsum(-1) - ends.long()

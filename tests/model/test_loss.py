"""The chunked loss against plain cross-entropy, and documents that do not see each other."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from dualres.model.decoder import build_decoder
from dualres.model.loss import Objective, chunked_cross_entropy, document_numbers
from tests.small import RESIDUALS, model_config, random_tokens, relative_error

N, D, V = 37, 29, 123
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 1e-3}


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


@pytest.mark.parametrize("rows", [1, 7, 36, 37, 38, 1000])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_chunked_cross_entropy(dtype: torch.dtype, rows: int):
    """Against float64 on the same rounded inputs; the gradient of twice the loss, so that its factor counts."""
    hidden, weight, targets = inputs(dtype)
    loss = chunked_cross_entropy(hidden, weight, targets, rows)
    (2 * loss).backward()
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = cross_entropy(linear(*exact), targets)
    (2 * wanted).backward()
    assert loss.dtype == torch.promote_types(dtype, torch.float32)
    # bfloat16 logits are off by 2⁻⁹ of their size, some ten here; the mean over tokens is closer.
    assert relative_error(loss, wanted) < TOLERANCES[dtype]
    for ours, theirs in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype == dtype
        assert relative_error(ours.grad, theirs.grad) < 4 * TOLERANCES[dtype]


def test_gradcheck():
    hidden, weight, targets = inputs(torch.float64)
    small = (hidden[:5, :4].detach().requires_grad_(), weight[:9, :4].detach().requires_grad_())
    assert torch.autograd.gradcheck(lambda h, w: chunked_cross_entropy(h, w, targets[:5] % 9, 2), small)


def test_logits_are_never_whole():
    """The largest tensor that the loss makes is `rows` × V, or as large as the weight."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.untyped_storage().nbytes() // out.element_size())
            return out

    hidden, weight, targets = torch.randn(4096, 8, requires_grad=True), torch.randn(1000, 8), torch.zeros(4096).long()
    with Watch():
        chunked_cross_entropy(hidden, weight.requires_grad_(), targets, 64).backward()
    assert largest == 64 * 1000


@pytest.mark.parametrize("changes", [{}, {"tied_embeddings": False}, {"embedding_width": 12}], ids=str)
def test_objective_is_the_mean_over_predicted_tokens(changes):
    decoder = build_decoder(model_config(**changes), RESIDUALS["dar-block"])
    sequences = random_tokens(3, 20)
    wanted = cross_entropy(decoder(sequences[:, :-1]).flatten(0, 1), sequences[:, 1:].flatten())
    assert Objective(decoder, 7)(sequences).item() == pytest.approx(wanted.item(), rel=1e-6)


def test_document_numbers():
    tokens = torch.tensor([[5, 9, 9, 4, 9], [1, 2, 3, 4, 5]])
    assert document_numbers(tokens, 9).tolist() == [[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize("residual", ["standard", "dar-block"])
def test_isolated_documents_are_as_if_alone(residual: str):
    """Rotary attention sees distances only, so a document has the same logits wherever it stands."""
    decoder = build_decoder(model_config(), RESIDUALS[residual])
    end = 96
    first, second = random_tokens(1, 7, 96), random_tokens(1, 9, 96, seed=1)
    packed = torch.cat([first, torch.tensor([[end]]), second], 1)
    with torch.no_grad():
        isolated = decoder.hidden(packed, documents=document_numbers(packed, end))
        attending = decoder.hidden(packed)
        alone = decoder.hidden(second)
    assert relative_error(isolated[:, 8:], alone) < 1e-5
    assert relative_error(attending[:, 8:], alone) > 1e-2
    assert relative_error(isolated[:, :8], attending[:, :8]) < 1e-6
    sequences = torch.cat([packed, torch.tensor([[3]])], 1)
    assert Objective(decoder, 100, end)(sequences).item() != Objective(decoder, 100)(sequences).item()

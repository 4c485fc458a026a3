"""Decoding: a cache, its chunks, left padding and `generate` change nothing about the logits."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from dualres.config.schema import ResidualConfig
from dualres.model.attention import LONG, KVCache, RouterReport, causal_mask
from dualres.model.decoder import Decoder
from dualres.model.generation import generate
from tests.small import (
    FEEDFORWARDS,
    RESIDUALS,
    gradients,
    model_config,
    next_token_loss,
    random_tokens,
    relative_error,
    stirred,
)

TOLERANCE = 1e-5
LENGTH = 13
CHUNKS = {"one by one": [1] * 13, "1 5 3 4": [1, 5, 3, 4], "10 1 1 1": [10, 1, 1, 1]}
REAL = (13, 6, 1)  # real tokens of the rows of a padded batch: the last row's first chunks are all padding
REAL_TOKENS = torch.arange(LENGTH) >= LENGTH - torch.tensor(REAL)[:, None]
MODELS = [*[(residual, "dense") for residual in RESIDUALS], ("standard", "moe"), ("dar-block", "moe")]
PROMPTS = [[5, 17, 3, 88, 41, 2, 60], [9], [70, 11, 52, 33]]


def calm(feedforward: str, residual: ResidualConfig, **changes: Any) -> Decoder:
    """Untied, since a tied output likes to repeat its input."""
    return stirred(model_config(feedforward, tied_embeddings=False, **changes), residual, seed=2, noise=0.12)


@pytest.fixture(params=MODELS, ids="-".join, scope="module")
def decoder(request):
    residual, feedforward = request.param
    return calm(feedforward, RESIDUALS[residual])


@pytest.fixture(params=FEEDFORWARDS, scope="module")
def one_decoder(request):
    return calm(request.param, RESIDUALS["dar-block"])


@pytest.fixture(autouse=True)
def without_gradient():
    with torch.no_grad():
        yield


def run_in_chunks(decoder: Decoder, tokens: Tensor, sizes: list[int], cache: Any, real: Tensor | None = None):
    """The logits of all chunks, in one. -> (B,T,V)"""
    logits, done = [], 0
    for chunk in tokens.split(sizes, 1):
        done += chunk.shape[1]
        seen = None if real is None else real[:, :done]
        logits.append(decoder(chunk, attention_mask=seen, cache=cache))
        assert cache.get_seq_length() == done
    return torch.cat(logits, 1)


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_cached_logits(decoder, sizes):
    tokens = random_tokens(length=LENGTH)
    wanted = decoder(tokens)
    assert wanted.std() > 0.3
    assert relative_error(run_in_chunks(decoder, tokens, sizes, KVCache()), wanted) < TOLERANCE


@pytest.mark.parametrize("real", [None, REAL_TOKENS], ids=["whole", "left-padded"])
@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_cache_of_transformers(one_decoder, sizes, real):
    tokens = random_tokens(length=LENGTH)
    wanted = run_in_chunks(one_decoder, tokens, sizes, KVCache(), real)
    assert torch.equal(run_in_chunks(one_decoder, tokens, sizes, DynamicCache(), real), wanted)


def test_cache_grows():
    """Past several sizes of its buffers, whose earlier results stay as they were."""
    ours, theirs, generator = KVCache(), DynamicCache(), torch.Generator().manual_seed(0)
    earlier: list[tuple[Tensor, Tensor]] = []
    for length in [3, *[1] * (2 * LONG), LONG, 200, 1]:
        key, value = torch.randn(2, 2, 3, length, 4, generator=generator)
        found, wanted = ours.update(key, value, 0), theirs.update(key, value, 0)
        assert all(map(torch.equal, found, wanted))
        earlier += zip(found, [tensor.clone() for tensor in found], strict=True)
    assert all(itertools.starmap(torch.equal, earlier))
    assert ours.get_seq_length() == theirs.get_seq_length()
    ours.update(key, value, 1)
    assert ours.get_seq_length() == theirs.get_seq_length()


def test_gradient_through_a_cache():
    decoder, tokens = calm("dense", RESIDUALS["standard"]), random_tokens(length=LENGTH)
    found = []
    with torch.enable_grad():
        for run in (lambda: run_in_chunks(decoder, tokens, CHUNKS["1 5 3 4"], KVCache()), lambda: decoder(tokens)):
            decoder.zero_grad()
            next_token_loss(run(), tokens).backward()
            found.append(gradients(decoder))
    for name, wanted in found[1].items():
        assert relative_error(found[0][name], wanted) < TOLERANCE, name


def test_logits_of_the_last_token(one_decoder):
    tokens = random_tokens(length=LENGTH)
    assert relative_error(one_decoder(tokens, last_only=True), one_decoder(tokens)[:, -1:]) < TOLERANCE


@pytest.mark.parametrize("sizes", [None, [1, 5, 3, 4]], ids=["uncached", "1 5 3 4"])
def test_left_padded_logits(decoder, sizes):
    tokens = random_tokens(len(REAL), LENGTH)
    if sizes is None:
        found = decoder(tokens, attention_mask=REAL_TOKENS)
    else:
        found = run_in_chunks(decoder, tokens, sizes, KVCache(), REAL_TOKENS)
    assert found.isfinite().all()
    for row, real in enumerate(REAL):
        assert relative_error(found[row, -real:], decoder(tokens[row : row + 1, -real:])[0]) < TOLERANCE


@pytest.mark.parametrize("past", [0, 1, 9])
def test_mask_leaves_no_row_empty(past):
    """Which PyTorch's attention on the CPU would forgive."""
    mask = causal_mask(LENGTH - past, past, REAL_TOKENS, None, REAL_TOKENS.device)
    assert mask is not None
    assert mask.shape == (len(REAL), 1, LENGTH - past, LENGTH)
    for row, query, key in itertools.product(range(len(REAL)), range(past, LENGTH), range(LENGTH)):
        may_look = key == query or (key < query and bool(REAL_TOKENS[row, key]))
        assert mask[row, 0, query - past, key] == may_look


@pytest.mark.parametrize("sizes", CHUNKS.values(), ids=CHUNKS)
def test_positions_count_from_the_first_real_token(one_decoder, sizes):
    """Rotary attention sees distances only, so logits do not tell where counting starts."""
    tables: list[Tensor] = []
    hook = one_decoder.stack.register_forward_pre_hook(
        lambda _, args, kwargs: tables.append(torch.cat([kwargs["context"].cosine, kwargs["context"].sine], -1)),
        with_kwargs=True,
    )
    tokens = random_tokens(len(REAL), LENGTH)
    one_decoder(tokens)
    run_in_chunks(one_decoder, tokens, sizes, KVCache())
    run_in_chunks(one_decoder, tokens, sizes, KVCache(), REAL_TOKENS)
    hook.remove()
    whole, chunked, padded = (
        torch.cat(part, 2) for part in (tables[:1], tables[1 : 1 + len(sizes)], tables[-len(sizes) :])
    )
    assert torch.equal(chunked, whole)
    for row, real in enumerate(REAL):
        assert torch.equal(padded[row, :, -real:], whole[0, :, :real])


def greedy(decoder: Decoder, prompt: list[int], new_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(new_tokens):
        tokens.append(int(decoder(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_generate_continues_each_prompt_as_if_alone(decoder):
    alone = [greedy(decoder, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)
    assert generate(decoder, PROMPTS, 6) == alone
    assert generate(decoder, PROMPTS, 6, cached=False) == alone
    assert generate(decoder, PROMPTS[2:], 6) == alone[2:]


def test_sampling_reproduces(one_decoder):
    def sample(seed: int, **options: Any) -> list[list[int]]:
        return generate(one_decoder, PROMPTS, 8, generator=torch.Generator().manual_seed(seed), **options)

    first = sample(0, temperature=1.0)
    assert sample(0, temperature=1.0) == first
    assert sample(0, temperature=1.0, cached=False) == first
    assert sample(1, temperature=1.0) != first
    assert sample(0) == sample(1) == sample(0, temperature=1e-6) == [greedy(one_decoder, p, 8) for p in PROMPTS]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 3.0])
def test_sampling_follows_the_tempered_distribution(temperature):
    decoder, draws = calm("dense", RESIDUALS["standard"], vocab_size=7), 5000
    generator = torch.Generator().manual_seed(0)
    drawn = torch.tensor(generate(decoder, [[3]] * draws, 1, temperature=temperature, generator=generator))
    wanted = (decoder(torch.tensor([[3]]))[0, -1] / temperature).softmax(-1)
    found = drawn.flatten().bincount(minlength=7) / draws
    deviation = (wanted * (1 - wanted) / draws).sqrt()
    assert ((found - wanted).abs() < 4 * deviation).all()


def test_no_new_tokens(one_decoder):
    assert generate(one_decoder, PROMPTS, 0) == [[]] * len(PROMPTS)


@pytest.mark.parametrize("prompts", [[], [[]], [[1, 2], []]], ids=str)
def test_empty_prompt(one_decoder, prompts):
    with pytest.raises(ValueError, match="at least one token"):
        generate(one_decoder, prompts, 3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"prompts": []}, "at least one token"),
        ({"new_tokens": -1}, "new_tokens=-1 is negative"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
    ],
)
def test_impossible_requests(one_decoder, arguments, says):
    with pytest.raises(ValueError, match=says):
        generate(one_decoder, **{"prompts": PROMPTS, "new_tokens": 1, **arguments})


def test_prompts_of_other_kinds(one_decoder):
    wanted = generate(one_decoder, PROMPTS, 3)
    assert generate(one_decoder, [torch.tensor(prompt) for prompt in PROMPTS], 3) == wanted  # type: ignore[misc]
    assert generate(one_decoder, PROMPTS, 0) == [[], [], []]
    with pytest.raises(TypeError):
        generate(one_decoder, [[1.5]], 1)  # type: ignore[list-item]


def test_real_tokens_as_numbers(one_decoder):
    """Tokenizers give 0 and 1."""
    tokens = random_tokens(len(REAL), LENGTH)
    wanted = one_decoder(tokens, attention_mask=REAL_TOKENS)
    assert torch.equal(one_decoder(tokens, attention_mask=REAL_TOKENS.long()), wanted)


def test_an_empty_report_says_so():
    with pytest.raises(ValueError, match="no MoE layer has reported"):
        RouterReport().mean()

"""Perplexity against explicit loops: every token once, every byte, whatever the text and the batch."""
# B rows  T tokens  V vocabulary

import dataclasses
import json
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from dualres.data.tokenizer import END_OF_TEXT
from dualres.evaluate import perplexity
from dualres.evaluate.batch_size import CHUNK_BYTES, Batch
from dualres.evaluate.documents import DocumentSource
from dualres.evaluate.perplexity import FirstToken, SourceScore, as_data, check_vocabulary, macro, pooled
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from tests.data.corpus import ODD
from tests.evaluate.tiny import (
    CONTEXT,
    TEXTS,
    bpe,
    bpe_tokenizer,
    byte_tokenizer,
    in_memory,
    source_of,
    tiny_llama,
    tiny_model,
)

PROTOCOLS: list[FirstToken] = ["scored", "skipped"]
TOKENIZERS: dict[str, Any] = {"bytes": byte_tokenizer(), "bpe": bpe_tokenizer()}
ENCODE = {"bytes": lambda text: list(text.encode()), "bpe": lambda text: bpe().encode(text)}


def score(
    model: TrainedModel, source: DocumentSource, rows: int = 3, first_token: FirstToken = "scored"
) -> SourceScore:
    return perplexity.score_source(model, source, batch=Batch(rows, model.context), first_token=first_token)


@torch.no_grad()
def by_hand(model: TrainedModel, documents: list[list[int]], first_token: FirstToken) -> tuple[int, float]:
    """Tokens and nats: one document, one window and one row at a time, the log-softmax in float64."""
    count, nats = 0, 0.0
    for tokens in documents:
        before = model.prefix
        for start in range(0, len(tokens), model.context):
            window = tokens[start : start + model.context]
            if first_token == "scored":
                read, predicted = [before, *window[:-1]], window
            else:
                read, predicted = window[:-1], window[1:]
            before = window[-1]
            if not predicted:
                continue
            assert len(read) <= model.context
            logits = model.network(input_ids=torch.tensor([read])).logits[0]
            log_p = logits.double().log_softmax(-1)
            for place, token in enumerate(predicted):
                nats -= log_p[place, token].item()
                count += 1
    return count, nats


@pytest.mark.parametrize("first_token", PROTOCOLS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_against_plain_transformers(tmp_path: Path, name: str, first_token: FirstToken):
    model = tiny_model(TOKENIZERS[name])
    found = score(model, source_of(tmp_path, TEXTS), first_token=first_token)
    tokens, nats = by_hand(model, [ENCODE[name](text) for text in TEXTS], first_token)
    assert (found.documents, found.tokens) == (len(TEXTS), tokens)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    size = sum(len(text.encode()) for text in TEXTS)
    assert found.bytes == size
    assert found.token_ppl == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    assert found.byte_ppl == pytest.approx(math.exp(nats / size), rel=1e-6)
    assert 2**found.bits_per_byte == pytest.approx(found.byte_ppl, rel=1e-12)
    assert (found.name, found.first_token, found.context) == ("some", first_token, CONTEXT)


def test_the_protocols_differ(tmp_path: Path):
    """A document of one token and more than the context: what each does not count."""
    model, source = tiny_model(), source_of(tmp_path, ["a", "b" * (2 * CONTEXT + 1)])
    assert score(model, source).tokens == 2 * CONTEXT + 2
    assert score(model, source, first_token="skipped").tokens == 2 * (CONTEXT - 1)


class Bigram(nn.Module):
    """log p(next | last) from a table; it notes the shapes that it reads."""

    def __init__(self, entries: int):
        super().__init__()
        self.table = nn.Embedding(entries, entries)
        self.config = SimpleNamespace(vocab_size=entries)
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.shapes: list[torch.Size] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, tokens: Tensor, use_cache: bool) -> Any:
        self.shapes.append(tokens.shape)
        return SimpleNamespace(logits=self.table(tokens))


def bigram_model(tokenizer: Any, context: int) -> TrainedModel:
    return in_memory("bigram", Bigram(len(tokenizer)), tokenizer, context)


UNICODE = st.lists(
    st.one_of(st.text(max_size=80), st.text("aé👩‍🚀\u0301 \n", max_size=40), st.sampled_from([*ODD.values()])),
    min_size=1,
    max_size=8,
).filter(any)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=UNICODE, context=st.integers(1, 40), rows=st.integers(1, 9))
def test_every_token_is_scored_once_after_the_one_before_it(name: str, texts: list[str], context: int, rows: int):
    model = bigram_model(TOKENIZERS[name], context)
    with tempfile.TemporaryDirectory() as folder:
        found = score(model, source_of(Path(folder), texts), rows)
    table = model.network.table.weight.detach().double().log_softmax(-1)
    encoded = [ENCODE[name](text) for text in texts]
    nats = 0.0
    for tokens in encoded:
        for last, token in zip([model.prefix, *tokens], tokens, strict=False):
            nats -= table[last, token].item()
    assert found.tokens == sum(map(len, encoded))
    assert found.bytes == sum(len(text.encode()) for text in texts)
    assert found.documents == len(texts)
    assert found.nats == pytest.approx(nats, rel=1e-6)
    for shape in model.network.shapes:
        assert 0 < shape[1] <= context
        assert shape[0] * shape[1] <= rows * context


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(texts=UNICODE, context=st.integers(2, 40), rows=st.integers(1, 9))
def test_skipped_tokens_are_the_first_of_windows(name: str, texts: list[str], context: int, rows: int):
    model = bigram_model(TOKENIZERS[name], context)
    encoded = [ENCODE[name](text) for text in texts]
    table = model.network.table.weight.detach().double().log_softmax(-1)
    wanted = [
        -table[tokens[place - 1], tokens[place]].item()
        for tokens in encoded
        for place in range(len(tokens))
        if place % context
    ]
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(Path(folder), texts)
        if not wanted:
            with pytest.raises(DataError, match="the source some has no token to score with bigram"):
                score(model, source, rows, "skipped")
            return
        found = score(model, source, rows, "skipped")
    assert found.tokens == len(wanted)
    assert found.bytes == sum(len(text.encode()) for text in texts)
    assert found.nats == pytest.approx(math.fsum(wanted), rel=1e-6)


@pytest.mark.parametrize("first_token", PROTOCOLS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(texts=UNICODE)
def test_the_batch_does_not_matter(first_token: FirstToken, texts: list[str]):
    model = tiny_model(TOKENIZERS["bpe"])
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(Path(folder), [*texts, "two words"])
        found = [score(model, source, rows, first_token) for rows in (1, 2, 64)]
    for other in found[1:]:
        assert other._replace(nats=0) == found[0]._replace(nats=0)
        assert other.nats == pytest.approx(found[0].nats, rel=1e-6)


def test_neither_does_the_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model, source = tiny_model(), source_of(tmp_path, TEXTS)
    whole = score(model, source)
    monkeypatch.setattr(perplexity, "BUFFER", 50)
    shown: list[tuple[str, float | None]] = []
    found = perplexity.score_source(
        model, source, batch=Batch(3, CONTEXT), show=lambda text, fraction=None: shown.append((text, fraction))
    )
    assert found._replace(nats=0) == whole._replace(nats=0)
    assert found.nats == pytest.approx(whole.nats, rel=1e-6)
    (first, started), *_, (last, ended) = shown
    assert first.startswith("some  ")
    assert f"{len(TEXTS)}/{len(TEXTS)} documents  " in last
    assert last.endswith(" tokens/s")
    assert started is not None
    assert 0 < started < 1 == ended


def test_special_tokens_of_a_text_are_text(tmp_path: Path):
    model = tiny_model()
    text = f"a{END_OF_TEXT}b"
    assert score(model, source_of(tmp_path, [text])).tokens == len(text)


def test_special_tokens_are_not_added(tmp_path: Path):
    """Though the tokenizer would."""
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 256)]
    )
    assert tokenizer("ab")["input_ids"] == [256, 97, 98]
    assert score(tiny_model(tokenizer), source_of(tmp_path, ["ab"])).tokens == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("chunk", [4, 4 * 257 * 5, 2**26])
def test_target_nats(dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch):
    """Against float64 on the same rounded logits; large ones, whose exponentials do not fit."""
    monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk)
    logits = (100 * torch.randn(37, 257)).to(dtype)
    targets = torch.randint(0, 257, (37,))
    found = perplexity.target_nats(logits, targets)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    wanted = -logits.double().log_softmax(-1)[torch.arange(37), targets]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-5 if dtype != torch.float64 else 1e-12)


def test_logits_are_never_copied_whole(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CHUNK_BYTES, "cpu", 4 * 257 * 5)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
                largest = max(largest, out.numel())
            return out

    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(37, 257).to(dtype)
        with Watch():
            perplexity.target_nats(logits, torch.zeros(37, dtype=torch.long))
        assert 0 < largest <= 5 * 257


def test_a_bfloat16_model(tmp_path: Path):
    """Its own logits, taken further in float32."""
    model = tiny_model()
    model = dataclasses.replace(model, network=model.network.to(torch.bfloat16))
    found = score(model, source_of(tmp_path, TEXTS), rows=1)
    tokens, nats = by_hand(model, [ENCODE["bytes"](text) for text in TEXTS], "scored")
    assert found.tokens == tokens
    # Short rows run together and their products round differently: 2⁻⁹ of each logit, less in the sum.
    assert found.nats == pytest.approx(nats, rel=1e-3)


def test_pooled_follows_the_equation():
    """exp(Σ nats / Σ tokens), not a mean of perplexities: 8 nats of 4 tokens and 90 of 30 make e^(98/34)."""
    small = SourceScore("small", 1, 4, 16, 8.0, "scored", 32)
    large = SourceScore("large", 5, 30, 60, 90.0, "scored", 32)
    together, mean = pooled([small, large]), macro([small, large])
    assert together == SourceScore("pooled", 6, 34, 76, 98.0, "scored", 32)
    assert together.token_ppl == pytest.approx(math.exp(98 / 34), rel=1e-12)
    assert together.byte_ppl == pytest.approx(math.exp(98 / 76), rel=1e-12)
    assert together.bits_per_byte == pytest.approx(98 / 76 / math.log(2), rel=1e-12)
    assert mean.sources == 2
    assert mean.token_ppl == pytest.approx((math.exp(2) + math.exp(3)) / 2, rel=1e-12)
    assert mean.byte_ppl == pytest.approx((math.exp(0.5) + math.exp(1.5)) / 2, rel=1e-12)
    assert mean.bits_per_byte == pytest.approx(1 / math.log(2), rel=1e-12)
    assert together.token_ppl > mean.token_ppl  # the large source is the harder one


@pytest.mark.parametrize("change", [{"first_token": "skipped"}, {"context": 64}], ids=str)
def test_scores_of_different_protocols_are_not_pooled(change):
    one = SourceScore("one", 1, 4, 16, 8.0, "scored", 32)
    with pytest.raises(DataError, match="cannot be pooled: use one --context"):
        pooled([one, one._replace(**change)])


def test_a_score_as_json():
    one = SourceScore("one", 1, 4, 16, 8.1, "skipped", 32)
    data = json.loads(json.dumps(as_data(one)))
    assert data["token_ppl"] == one.token_ppl
    assert data["first_token"] == "skipped"
    assert {name: data[name] for name in one._fields} == one._asdict()


def test_a_perplexity_beyond_numbers():
    assert SourceScore("one", 1, 1, 1, 1000.0, "scored", 32).token_ppl == math.inf


@pytest.mark.parametrize("change", ["rows", "config"])
def test_a_vocabulary_beyond_the_model_is_refused(tmp_path: Path, change: str):
    """Before the model is asked anything."""
    model = tiny_model()
    if change == "rows":
        model = dataclasses.replace(model, network=tiny_llama(vocab_size=256))
    else:
        model.network.config.vocab_size = 256
    model.network.forward = None
    with pytest.raises(DataError, match=r"tokenizer of tiny has the token '<\|endoftext\|>' with id 256.* 256 entries"):
        check_vocabulary(model)
    with pytest.raises(DataError, match="has 256 entries"):
        score(model, source_of(tmp_path, ["a"]))


def test_a_vocabulary_below_the_models_is_fine(tmp_path: Path):
    check_vocabulary(tiny_model(vocab_size=300))


@pytest.mark.parametrize("prefix", [-1, 257])
def test_a_prefix_beyond_the_model_is_refused(prefix: int):
    with pytest.raises(DataError, match="start token of tiny"):
        check_vocabulary(dataclasses.replace(tiny_model(), prefix=prefix))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_likelihood_that_is_not_finite_is_refused(tmp_path: Path, value: float, monkeypatch: pytest.MonkeyPatch):
    """Z in the third document, which is not the longest, and not in the first buffer."""
    monkeypatch.setattr(perplexity, "BUFFER", 10)
    model = bigram_model(byte_tokenizer(), CONTEXT)
    model.network.table.weight.data[ord("Z")] = value
    source = source_of(tmp_path, ["a" * 40, "", "bZc", "d" * 30], "gab")
    with pytest.raises(DataError, match="bigram assigns document 3 of the source gab a log-likelihood of nan"):
        score(model, source)


def test_padding_is_not_read(tmp_path: Path):
    """A prefix whose prediction is not a number: it pads a shorter row, and in this protocol nothing else."""
    model = bigram_model(byte_tokenizer(), CONTEXT)
    model.network.table.weight.data[model.prefix] = math.nan
    found = score(model, source_of(tmp_path, ["a" * 10, "b" * 7]), first_token="skipped")
    assert model.network.shapes == [(2, 9)]
    assert math.isfinite(found.nats)

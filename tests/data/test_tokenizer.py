"""Tokenizers give back what they read, and Tekken is Mistral's."""

import importlib.resources
import itertools
import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import mistral_common
import numpy as np
import pytest
import tokenizers
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from dualres.data import tokenizer as tokenizer_module
from dualres.data.tokenizer import Tokenizer, byte_tokenizer, load, merges_of, tekken, train_bpe
from dualres.util.errors import DataError
from tests.data.corpus import ALL_ODD, ODD

TOPICS = list(pydoc_data.topics.topics.values())


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(iter(TOPICS[:20]), 600)


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return tekken()


@pytest.fixture(scope="module")
def mistrals() -> Tekkenizer:
    return Tekkenizer.from_file(str(importlib.resources.files(mistral_common) / "data" / "tekken_240911.json"))


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_bytes_round_trip(text: str):
    tokenizer = byte_tokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_bpe_round_trip(bpe: Tokenizer, text: str):
    assert bpe.decode(bpe.encode(text)) == text
    assert bpe.end_of_text not in bpe.encode(text)


def test_vocabularies(bpe: Tokenizer, ours: Tokenizer):
    found = [(t.vocab_size, t.end_of_text) for t in (byte_tokenizer(), bpe, ours)]
    assert found == [(257, 256), (600, 599), (131_072, 2)]


def test_a_bpe_merges(bpe: Tokenizer):
    text = TOPICS[30]
    tokens = bpe.encode(text)
    assert bpe.decode(tokens) == text
    assert len(tokens) < 0.6 * len(text.encode())


def test_the_copying_of_bytes_is_what_the_tokenizer_does():
    tokenizer = byte_tokenizer()
    assert tokenizer.is_bytes
    assert tokenizer.backend.encode(ALL_ODD, add_special_tokens=False).ids == list(ALL_ODD.encode())


def byte_level(**changes: Any) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_tokenizer().backend.to_str())
    for name, value in changes.items():
        setattr(backend, name, value)
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(normalizer=normalizers.Lowercase()),
        byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    ],
    ids=["normalizer", "prefix"],
)
def test_nearly_bytes_are_not_copied(tmp_path: Path, backend: tokenizers.Tokenizer):
    backend.save(str(tmp_path / "t.json"))
    tokenizer = load(tmp_path / "t.json")
    assert tokenizer.encode("Text") == backend.encode("Text").ids != list(b"Text")


def test_a_batch_is_its_texts_one_by_one(bpe: Tokenizer):
    for tokenizer in (bpe, byte_tokenizer()):
        batch = tokenizer.encode_batch(list(ODD.values()))
        assert [tokens.tolist() for tokens in batch] == [tokenizer.encode(text) for text in ODD.values()]
        assert {tokens.dtype for tokens in batch} == {np.dtype(np.uint32)}


def test_training_reproduces(bpe: Tokenizer):
    again = train_bpe(iter(TOPICS[:20]), 600)
    assert again.backend.to_str() == bpe.backend.to_str()
    assert again.fingerprint == bpe.fingerprint


def test_training_reads_the_first_texts(monkeypatch: pytest.MonkeyPatch):
    """64 MiB of them; here 64 KiB."""
    assert tokenizer_module.TRAINING_BYTES == 64 * 2**20
    monkeypatch.setattr(tokenizer_module, "TRAINING_BYTES", 64 * 2**10)
    texts = iter(["ab é x " * 2**7] * 100)  # a KiB each
    train_bpe(texts, 300)
    assert len(list(texts)) == 36


@pytest.mark.parametrize("size", [0, 1, 256])
def test_a_bpe_needs_room_for_bytes(size: int):
    with pytest.raises(DataError, match=f"bpe:{size} has no room"):
        train_bpe(iter(TOPICS), size)


def test_little_text_makes_a_small_bpe():
    tokenizer = train_bpe(iter(["aaaa"]), 4096)
    assert tokenizer.vocab_size < 262
    assert tokenizer.decode(tokenizer.encode(ALL_ODD)) == ALL_ODD


@pytest.mark.parametrize("text", ODD.values(), ids=ODD)
def test_tekken_is_mistrals_on_odd_text(ours: Tokenizer, mistrals: Tekkenizer, text: str):
    tokens = ours.encode(text)
    assert tokens == mistrals.encode(text, bos=False, eos=False)
    assert ours.decode(tokens) == mistrals.decode(tokens, SpecialTokenPolicy.IGNORE) == text


def test_tekken_is_mistrals_on_real_text(ours: Tokenizer, mistrals: Tekkenizer):
    texts = [*TOPICS[::4], Path(json.__file__).read_text(), Path(pydoc_data.topics.__file__).read_text()[:100_000]]
    for text, tokens in zip(texts, ours.encode_batch(texts), strict=True):
        assert tokens.tolist() == mistrals.encode(text, bos=False, eos=False)


def test_tekken_has_every_entry_of_mistrals(ours: Tokenizer, mistrals: Tekkenizer):
    assert ours.vocab_size == mistrals.n_words
    assert ours.end_of_text == mistrals.eos_id
    numbers = range(1000, 131_072, 97)
    assert [ours.backend.decode([n]) for n in numbers] == [
        mistrals.decode([n], SpecialTokenPolicy.IGNORE) for n in numbers
    ]


def test_merges_of_a_ranked_vocabulary():
    """By rank, not from left to right; what no pair makes has none."""
    pieces = [b"a", b"b", b"c", b"bc", b"ab", b"abc", b"cab", b"abcab", b"zz", b"caa"]
    found = [(b"b", b"c"), (b"a", b"b"), (b"a", b"bc"), (b"c", b"ab"), (b"abc", b"ab"), (b"z", b"z")]
    assert list(merges_of(pieces)) == found


def test_fingerprints(tmp_path: Path, bpe: Tokenizer):
    other_text, other_size = train_bpe(iter(TOPICS[20:40]), 600), train_bpe(iter(TOPICS[:20]), 599)
    other_end = Tokenizer(tokenizers.Tokenizer.from_str(bpe.backend.to_str()), 7)
    prints = {t.fingerprint for t in (bpe, other_text, other_size, other_end, byte_tokenizer())}
    assert len(prints) == 5
    bpe.save(tmp_path / "tokenizer.json")
    assert load(tmp_path / "tokenizer.json").fingerprint == bpe.fingerprint
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(described, sort_keys=True, indent=7))
    assert load(tmp_path / "other.json").fingerprint == bpe.fingerprint


def test_what_others_stored_is_read(tmp_path: Path):
    """A tokenizer.json that cuts, pads and adds a beginning: none of it is wanted in a document."""
    backend = byte_level()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 257), ("</s>", 258)]
    )
    backend.enable_truncation(5)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "t.json"))
    assert len(backend.encode("hello world").ids) == 9
    made = {end: load(tmp_path / "t.json", end) for end in (None, "</s>", 258)}
    assert [tokenizer.end_of_text for tokenizer in made.values()] == [256, 258, 258]
    for tokenizer, text in itertools.product(made.values(), ("", "hi", "hello <s> world")):
        assert tokenizer.encode(text) == list(text.encode())
    assert made[None].fingerprint != made["</s>"].fingerprint == made[258].fingerprint


def test_a_document_cannot_end_itself(tmp_path: Path):
    """Even where the end is a token like any other."""
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.Fuse()
    backend.add_tokens([AddedToken("</s>", special=False)])
    assert backend.encode("a </s> a").ids == [0, 2, 0]
    backend.save(str(tmp_path / "t.json"))
    assert load(tmp_path / "t.json").encode("a </s> a") == [0, 1, 0]


@pytest.mark.parametrize(
    ("content", "end", "says"),
    [
        ("{}", None, "is not a tokenizer.json"),
        (None, None, "is not a tokenizer.json"),
        (tokenizers.Tokenizer(models.BPE()).to_str(), None, "has none of the end-of-text tokens <|endoftext|>"),
        (byte_tokenizer().backend.to_str(), "<end>", "has none of the end-of-text tokens <end>.*--end-of-text"),
    ],
    ids=["other json", "missing", "no end", "another end"],
)
def test_tokenizers_that_cannot_be_used(tmp_path: Path, content: str | None, end: str | None, says: str):
    if content is not None:
        (tmp_path / "t.json").write_text(content)
    with pytest.raises(DataError, match=f"t.json {says.replace('|', '.')}"):
        load(tmp_path / "t.json", end)

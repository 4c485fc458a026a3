"""Tokenizers: bytes, a BPE trained on the source, any `tokenizer.json`, and Tekken; all stored as `tokenizer.json`."""

import base64
import functools
import hashlib
import importlib.resources
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers

from dualres.config.validation import suggesting, suggesting_path
from dualres.util.atomic_files import write_text
from dualres.util.errors import DataError
from dualres.util.optional_dependencies import need

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "[SEP]")
TRAINING_BYTES = 64 * 2**20  # of text for BPE training, from the start of the source

Tokens = NDArray[np.uint32]


class Tokenizer:
    """Converts text to token ids and back. Special tokens in a text are encoded as plain text."""

    def __init__(self, backend: tokenizers.Tokenizer, end_of_text: int):
        added = backend.get_added_tokens_decoder().get(end_of_text)
        if added is None or not added.special:
            backend.add_special_tokens([AddedToken(backend.id_to_token(end_of_text), special=True, normalized=False)])
        backend.encode_special_tokens = True
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.end_of_text = end_of_text
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.is_bytes = _is_bytes(backend)

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The tokens of each text, without end of text, on all cores."""
        if self.is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0].tolist()

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of `tokens`, without special tokens."""
        return self.backend.decode(list(tokens))

    @functools.cached_property
    def fingerprint(self) -> str:
        """Equal for tokenizers that behave the same."""
        described = json.dumps(json.loads(self.backend.to_str()), sort_keys=True, ensure_ascii=True)
        return hashlib.blake2b(f"{described}{self.end_of_text}".encode(), digest_size=16).hexdigest()

    def save(self, path: Path) -> None:
        """Write a `tokenizer.json`, which `tokenizers` and `transformers` can load."""
        write_text(path, self.backend.to_str(pretty=True))


def same_tokens(first: tokenizers.Tokenizer, second: tokenizers.Tokenizer, end_of_text: int) -> bool:
    """Whether both tokenize a text and end it in the same way; added tokens and decoding may differ."""
    copies = [tokenizers.Tokenizer.from_str(json.dumps(tokens_description(backend))) for backend in (first, second)]
    if any(copy.id_to_token(end_of_text) is None for copy in copies):
        return False
    return len({Tokenizer(copy, end_of_text).fingerprint for copy in copies}) == 1


def tokens_description(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The parts that determine the tokens of a text, without post-processing and decoding."""
    removed = dict.fromkeys(("post_processor", "decoder", "truncation", "padding"))
    return {**json.loads(backend.to_str()), **removed}


def read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises plain exceptions
        remedy = "restore it, or use another"
        raise DataError(f"{path} is not a tokenizer.json that `tokenizers` can read: {error}; {remedy}") from None


def load(path: Path, end_of_text: int | str | None = None) -> Tokenizer:
    """A `tokenizer.json`. `end_of_text` is a token's id or text; by default the first of `KNOWN_ENDS` that it has."""
    backend = read_backend(path)
    if isinstance(end_of_text, int):
        return Tokenizer(backend, end_of_text)
    names = (end_of_text,) if end_of_text else KNOWN_ENDS
    ids = [number for name in names if (number := backend.token_to_id(name)) is not None]
    if not ids:
        raise DataError(f"{path} has none of the end-of-text tokens {', '.join(names)}: pass one with --end-of-text")
    return Tokenizer(backend, ids[0])


def choose(name: str, stored: Path, texts: Iterator[str], end_of_text: str | None) -> Tokenizer:
    """The tokenizer selected by `--tokenizer`. A BPE is trained on `texts`, unless it is already `stored`."""
    if name == "bytes":
        return byte_tokenizer()
    if name == "tekken":
        return tekken()
    if name.startswith("bpe:"):
        if stored.exists():
            return load(stored)
        if not name[4:].isdecimal():
            raise DataError(f"--tokenizer {name}: use bpe:4096, with the vocabulary size after the colon")
        return train_bpe(texts, int(name[4:]))
    if Path(name).is_file():
        return load(Path(name), end_of_text)
    message = f"--tokenizer {name}: use bytes, bpe:4096, tekken, or the path of a tokenizer.json"
    raise DataError(suggesting_path(suggesting(message, name, ("bytes", "bpe:4096", "tekken")), Path(name)))


def byte_tokenizer() -> Tokenizer:
    """A tokenizer of 256 bytes and end of text."""
    return Tokenizer(*_byte_backend())


def train_bpe(texts: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of `vocab_size` tokens, end of text included, trained on the first 64 MiB of `texts`."""
    if vocab_size < 257:
        raise DataError(f"--tokenizer bpe:{vocab_size} has no room for 256 bytes and end of text: use at least bpe:257")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(_first(texts, TRAINING_BYTES), trainer)
    return Tokenizer(*_byte_level(backend))


def tekken() -> Tokenizer:
    """Mistral's Tekken with 131,072 tokens, the paper's vocabulary size, from the package `mistral-common`.

    1,000 special tokens come first. The package lists tokens by rank; the BPE merges follow from them.
    """
    folder = importlib.resources.files(need("mistral_common", "data", "the Tekken tokenizer")) / "data"
    file = next(f for f in sorted(folder.iterdir(), key=lambda f: f.name, reverse=True) if f.name.startswith("tekken_"))
    described = json.loads(file.read_text(encoding="utf-8"))
    config = described["config"]
    specials = config["default_num_special_tokens"]
    regular = described["vocab"][: config["default_vocab_size"] - specials]
    pieces = [base64.b64decode(entry["token_bytes"]) for entry in regular]
    alphabet = _byte_letters()

    def letters(piece: bytes) -> str:
        return "".join(alphabet[byte] for byte in piece)

    special_names = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, specials))]
    vocab = {name: i for i, name in enumerate(special_names)}
    vocab |= {letters(piece): specials + rank for rank, piece in enumerate(pieces)}
    merges = [(letters(a), letters(b)) for a, b in merges_of(pieces)]
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(config["pattern"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in special_names])
    return Tokenizer(backend, special_names.index("</s>"))


def merges_of(pieces: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The merge that forms each token of a ranked vocabulary: the pair left before the last merge by rank."""
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    for rank, piece in enumerate(pieces):
        parts = [piece[i : i + 1] for i in range(len(piece))]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            best = min(pairs)
            if best >= rank:
                break
            i = pairs.index(best)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def _byte_backend() -> tuple[tokenizers.Tokenizer, int]:
    vocab = {letter: byte for byte, letter in enumerate(_byte_letters())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _byte_level(backend)


def _byte_level(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, int]:
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return backend, backend.get_vocab(with_added_tokens=True)[END_OF_TEXT]


def _byte_letters() -> list[str]:
    """The character that `tokenizers` writes for each byte: itself if printable, the others continue from 256."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _is_bytes(backend: tokenizers.Tokenizer) -> bool:
    """Whether every byte is its own token id, so that encoding just copies bytes."""
    return backend.get_vocab_size() == 257 and backend.to_str() == _byte_backend()[0].to_str()


def _first(texts: Iterator[str], size: int) -> Iterator[str]:
    for text in texts:
        yield text
        size -= len(text.encode())
        if size <= 0:
            return

"""The loss on held-out tokens: the number that training gives, and what is refused."""
# B rows  T tokens  V vocabulary

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.normalizers import Lowercase
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from dualres.data.shards import INDEX, TOKENIZER, read_index
from dualres.evaluate.batch_size import Batch
from dualres.evaluate.validation import ValidationScore, validation_loss
from dualres.hub.open_model import TrainedModel, open_model
from dualres.util.errors import DataError
from tests.evaluate.tiny import Small, bpe_tokenizer, byte_tokenizer, tiny_model
from tests.train.tiny import TINY, rows, tiny_config, tiny_data, train_tiny

CONTEXT = 32  # of the tiny runs
VALIDATED = int(TINY["train.validation_tokens"])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("residual", "feedforward"), [("standard", "dense"), ("dar-block", "moe")])
def test_it_is_the_number_of_the_run(data: Path, tmp_path: Path, residual: str, feedforward: str):
    """Seven windows in micro-batches of two, there; three at a time, here."""
    config = tiny_config(residual, feedforward, train__tokens=8 * 4 * CONTEXT, train__validate_every=4)
    done = train_tiny(config, data, tmp_path)
    found = validation_loss(open_model(tmp_path), data, batch=Batch(3, CONTEXT), tokens=VALIDATED)
    assert done.validation_loss == rows(tmp_path)[-1]["validation_loss"]
    assert found.loss == pytest.approx(done.validation_loss, rel=1e-6)
    assert (found.tokens, found.context, found.content) == (VALIDATED, CONTEXT, read_index(data).content)


def held_out(data: Path) -> Tensor:
    """All tokens of the split, read without the loader."""
    index = read_index(data)
    return torch.cat(
        [
            torch.from_numpy(np.fromfile(data / shard.file, np.dtype(index.dtype).newbyteorder("<")).astype(np.int64))
            for shard in index.validation
        ]
    )


@torch.no_grad()
def by_hand(model: TrainedModel, tokens: Tensor, windows: int) -> float:
    losses = []
    for start in range(0, windows * CONTEXT, CONTEXT):
        logits = model.network(tokens[None, start : start + CONTEXT]).logits
        losses.append(cross_entropy(logits[0].double(), tokens[start + 1 : start + CONTEXT + 1]))
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize("asked", [None, 1, CONTEXT, 5 * CONTEXT - 1, 5 * CONTEXT, 10**9])
def test_against_plain_transformers(data: Path, asked: int | None):
    """Whole windows, at least one, at most all that there are."""
    model, tokens = tiny_model(context=CONTEXT), held_out(data)
    every = (len(tokens) - 1) // CONTEXT
    windows = every if asked is None else min(every, max(1, asked // CONTEXT))
    shown: list[tuple[str, float | None]] = []
    found = validation_loss(
        model,
        data,
        batch=Batch(64, CONTEXT),
        tokens=asked,
        show=lambda text, fraction=None: shown.append((text, fraction)),
    )
    assert found.tokens == windows * CONTEXT
    assert found.loss == pytest.approx(by_hand(model, tokens, windows), rel=1e-6)
    assert shown[-1][0].startswith("validation  ")
    assert shown[-1][1] == 1
    assert every > 100


def test_halved_where_memory_is_not_enough(data: Path):
    model = tiny_model(context=CONTEXT)
    wanted = validation_loss(model, data, batch=Batch(2, CONTEXT), tokens=50 * CONTEXT)
    batch, small = Batch(64, CONTEXT), Small(model.network, 5 * CONTEXT)
    found = validation_loss(dataclasses.replace(model, network=small), data, batch=batch, tokens=50 * CONTEXT)
    assert found.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert found.tokens == wanted.tokens
    assert batch.tokens == 3 * CONTEXT  # 50, 25, 12, 6, 3


def test_another_tokenizer_is_refused(data: Path):
    with pytest.raises(DataError, match="prepared with a different tokenizer from tiny's: prepare"):
        validation_loss(tiny_model(bpe_tokenizer(), CONTEXT), data, batch=Batch(2, CONTEXT))


def more_tokens(tokenizer: Any) -> None:
    tokenizer.add_tokens(["while"])


def lower_case(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = Lowercase()


@pytest.mark.parametrize("change", [more_tokens, lower_case])
def test_a_tokenizer_that_makes_other_tokens_is_refused(data: Path, change: Any):
    tokenizer = byte_tokenizer()
    change(tokenizer)
    with pytest.raises(DataError, match="a different tokenizer"):
        validation_loss(tiny_model(tokenizer, CONTEXT), data, batch=Batch(2, CONTEXT))


def test_a_tokenizer_without_a_backend_is_refused(data: Path):
    model = dataclasses.replace(tiny_model(context=CONTEXT), tokenizer=SimpleNamespace())
    with pytest.raises(DataError, match="a different tokenizer"):
        validation_loss(model, data, batch=Batch(2, CONTEXT))


def test_what_a_tokenizer_adds_does_not_matter(data: Path, tmp_path: Path):
    """Nor that it was saved and loaded, nor how it pads: shards hold the tokens of the text alone."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer("abc", padding="max_length", truncation=True, max_length=5)
    found = validation_loss(tiny_model(tokenizer, CONTEXT), data, batch=Batch(2, CONTEXT), tokens=CONTEXT)
    assert found.tokens == CONTEXT
    assert tokenizer("a<|endoftext|>")["input_ids"] == [97, 256]  # it is left as it was


def test_tokens_beyond_the_model_are_refused(data: Path):
    """Before the model reads any."""
    model = tiny_model(context=CONTEXT, vocab_size=200)
    model.network.forward = None
    with pytest.raises(DataError, match=r"has token 256 at position \d+, outside model.vocab_size=200"):
        validation_loss(model, data, batch=Batch(2, CONTEXT))


def copied(data: Path, folder: Path) -> Path:
    return Path(shutil.copytree(data, folder / "copy"))


def altered_shard(folder: Path) -> str:
    path = folder / read_index(folder).validation[0].file
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    return "was altered"


def no_held_out(folder: Path) -> str:
    index = read_index(folder)
    described = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**described, **dataclasses.asdict(index), "validation": []}))
    return "the validation split of .* has 0 tokens, too few"


def no_index(folder: Path) -> str:
    (folder / INDEX).unlink()
    return "has no index.json: create it with `dualres prepare"


def no_tokenizer(folder: Path) -> str:
    (folder / TOKENIZER).unlink()
    return "tokenizer.json"


@pytest.mark.parametrize("spoil", [altered_shard, no_held_out, no_index, no_tokenizer])
def test_folders_that_are_refused(data: Path, tmp_path: Path, spoil: Any):
    folder = copied(data, tmp_path)
    says = spoil(folder)
    with pytest.raises(DataError, match=says):
        validation_loss(tiny_model(context=CONTEXT), folder, batch=Batch(2, CONTEXT))


def test_a_damaged_train_split_does_not_matter(data: Path, tmp_path: Path):
    """Its files must be there, but are not read."""
    folder = copied(data, tmp_path)
    path = folder / read_index(folder).train[0].file
    path.write_bytes(bytes(len(path.read_bytes())))
    assert validation_loss(tiny_model(context=CONTEXT), folder, batch=Batch(2, CONTEXT), tokens=1).tokens == CONTEXT


def test_a_loss_that_is_not_finite_is_refused(data: Path):
    model = tiny_model(context=CONTEXT)
    model.network.lm_head.weight.data[:] = torch.nan
    with pytest.raises(DataError, match="tiny has a loss of nan in windows 1 to 2 of"):
        validation_loss(model, data, batch=Batch(2, CONTEXT))


def test_a_score_as_json():
    score = ValidationScore(2.5, 64, 32, "abc")
    assert ValidationScore(**json.loads(json.dumps(score._asdict()))) == score

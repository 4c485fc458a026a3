"""How many rows run together: by memory, and halved where it was not enough."""

import dataclasses
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dualres.evaluate import batch_size
from dualres.evaluate.batch_size import CHUNK_BYTES, MAX_ROWS, Batch, batch_for, row_bytes
from dualres.evaluate.perplexity import score_source
from dualres.hub.open_model import TrainedModel
from dualres.plan.activations import LiveBytes
from tests.evaluate.tiny import CONTEXT, TEXTS, Small, source_of, tiny_model


@pytest.mark.parametrize("room", [CONTEXT, 2 * CONTEXT + 1, 5 * CONTEXT])
def test_halved_where_memory_is_not_enough(tmp_path: Path, room: int):
    """Nothing is lost, and the smaller size stays, for the next source too."""
    model, source = tiny_model(), source_of(tmp_path, TEXTS)
    wanted = score_source(model, source, batch=Batch(4, CONTEXT))
    batch, small = Batch(64, CONTEXT), Small(model.network, room)
    found = score_source(dataclasses.replace(model, network=small), source, batch=batch)
    assert found._replace(nats=0) == wanted._replace(nats=0)
    assert found.nats == pytest.approx(wanted.nats, rel=1e-6)
    assert small.asked[0] > room
    assert room // 2 <= batch.tokens <= room
    failures = sum(asked > room for asked in small.asked)
    assert failures <= 6  # 64 to 1
    small.asked.clear()
    score_source(dataclasses.replace(model, network=small), source, batch=batch)
    assert max(small.asked) <= room


def test_one_row_that_does_not_fit_is_an_error(tmp_path: Path):
    model = tiny_model()
    small = Small(model.network, CONTEXT - 1)
    with pytest.raises(torch.OutOfMemoryError):
        score_source(dataclasses.replace(model, network=small), source_of(tmp_path, TEXTS), batch=Batch(2, CONTEXT))


def test_every_row_once_and_in_order():
    rows = [range(length) for length in (9, 9, 7, 7, 7, 4, 3, 3, 2, 1, 1, 1, 1)]
    room = 40

    def work(piece: Any) -> list[range]:
        nonlocal room
        if sum(map(len, piece)) > room:
            raise torch.OutOfMemoryError
        room -= 5  # someone else takes more and more of it
        return list(piece)

    batch = Batch(9, 9)
    pieces = list(batch.map(rows, work))
    assert [row for piece in pieces for row in piece] == rows


def test_short_rows_run_together():
    batch = Batch(2, 8)
    rows = [range(length) for length in (8, 8, 8, 4, 4, 4, 1, 1, 1)]
    assert [len(piece) for piece in batch.map(rows, lambda piece: piece)] == [2, 2, 4, 1]


def test_what_failed_is_freed_before_it_is_tried_again():
    """The traceback of the error holds the tensors of the model."""
    held: list[weakref.ref[Tensor]] = []

    def work(piece: Any) -> int:
        gone = [ref() is None for ref in held]
        assert all(gone)
        activations = torch.zeros(len(piece))
        held.append(weakref.ref(activations))
        if len(piece) > 1:
            raise torch.OutOfMemoryError
        return len(piece)

    gc.disable()
    try:
        assert list(Batch(8, 1).map([range(1)] * 3, work)) == [1, 1, 1]
    finally:
        gc.enable()
    assert len(held) == 4  # of 3 rows, then of 1


def test_an_integer_overrides():
    model = tiny_model()
    assert batch_for(model, 3).tokens == 3 * CONTEXT
    assert batch_for(model, 1000).tokens == 1000 * CONTEXT


def with_free(monkeypatch: pytest.MonkeyPatch, count: float) -> None:
    monkeypatch.setattr(batch_size, "free_memory", lambda device: count)


def test_the_size_follows_the_memory(monkeypatch: pytest.MonkeyPatch):
    model = tiny_model()
    row = row_bytes(model)
    for rows, wanted in [(-100, 1), (0, 1), (1, 1), (7.5, 7), (63, 63), (10**6, MAX_ROWS)]:
        with_free(monkeypatch, 2 * (rows * row + 3 * CHUNK_BYTES["cpu"]))
        assert batch_for(model).tokens == wanted * CONTEXT


@pytest.mark.parametrize(("device", "context", "rows"), [("cpu", 4096, 2), ("cpu", 10**5, 1), ("cuda", 4096, 32)])
def test_no_more_than_is_useful(monkeypatch: pytest.MonkeyPatch, device: str, context: int, rows: int):
    with_free(monkeypatch, 2**50)
    model = tiny_model()
    weight = SimpleNamespace(device=torch.device(device), dtype=torch.float32)
    network = SimpleNamespace(
        parameters=lambda: iter([weight]),
        config=model.network.config,
        get_input_embeddings=model.network.get_input_embeddings,
        get_output_embeddings=model.network.get_output_embeddings,
    )
    assert batch_for(dataclasses.replace(model, network=network, context=context)).tokens == rows * context


def test_what_a_row_needs():
    """Logits 257, states (2·2 + 8)·32, feed-forward 4·64, scores 2·16 per token; half of it in half the precision."""
    model = tiny_model()
    assert row_bytes(model) == (257 + 12 * 32 + 4 * 64 + 2 * 16) * 16 * 4
    assert (
        row_bytes(dataclasses.replace(model, network=model.network.bfloat16()))
        == (257 + 12 * 32 + 4 * 64 + 2 * 16) * 16 * 2
    )


def test_the_estimate_is_above_what_is_measured():
    """Of a model with the proportions of a real one; live bytes of a forward pass, beside the weights."""
    model = tiny_model(context=256, vocab_size=4096, hidden_size=128, intermediate_size=512, num_hidden_layers=4)
    peak = live_bytes(model)
    assert peak < row_bytes(model) < 6 * peak


def live_bytes(model: TrainedModel) -> int:
    tokens = torch.zeros(1, model.context, dtype=torch.long)
    with torch.no_grad(), LiveBytes([*model.network.parameters(), *model.network.buffers()]) as live:
        model.network(tokens, use_cache=False)
        return live.peak


def test_here(tmp_path: Path):
    """With nothing replaced, the size that this machine gives serves."""
    model = tiny_model()
    found = score_source(model, source_of(tmp_path, TEXTS), batch=batch_for(model))
    assert found.documents == len(TEXTS)

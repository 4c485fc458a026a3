"""Validation loss on the held-out tokens of a prepared folder, in the windows that training validates on."""

import dataclasses
import math
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dualres.data import shards
from dualres.data.loader import Loader, sum_over_windows
from dualres.evaluate.batch_size import Batch
from dualres.evaluate.perplexity import Window, window_nats
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from dualres.util.progress import Show, short, silent


class ValidationScore(NamedTuple):
    """Mean cross-entropy of the next token."""

    loss: float  # nats per token
    tokens: int  # predicted
    context: int
    content: str  # digest of the prepared folder

    def __str__(self) -> str:
        return f"loss {self.loss:.4f}"


def validation_loss(
    model: TrainedModel, data: Path, *, batch: Batch, tokens: int | None = None, show: Show = silent
) -> ValidationScore:
    """Mean loss on the `validation` split in text order, in windows of the model's context.

    `tokens` limits the number of tokens to whole windows, at least one, like `train.validation_tokens`; None uses all.
    Documents are packed, and a token attends to its whole window even if the run used train.documents=isolate.
    """
    index = shards.read_index(data)
    model.check_tokens(data)
    shards.verify(data, dataclasses.replace(index, train=()), model.vocab_size)
    context = model.context
    loader = Loader(data, index, "validation", context, None)
    count = loader.windows_within(tokens)
    done, start = 0, time.monotonic()

    def batch_nats(sequences: Tensor) -> float:
        nonlocal done
        windows = [Window(number, row) for number, row in enumerate(sequences.numpy(), start=done + 1)]
        nats = 0.0
        for values in batch.map(windows, lambda piece: window_nats(model, piece)):
            nats += math.fsum(values)
            done += len(values)
            rate = short(done * context / max(1e-9, time.monotonic() - start))
            text = f"validation  {short(done * context)}/{short(count * context)} tokens  {rate} tokens/s"
            show(text, done / count)
        if not math.isfinite(nats):
            raise DataError(
                f"{model.name} has a loss of {nats} in windows {windows[0].document} to {done} of {data}: check its "
                "weights, or use another dtype such as float32"
            )
        return nats

    nats = sum_over_windows(loader, count, max(1, batch.tokens // context), batch_nats)
    return ValidationScore(nats / (count * context), count * context, context, index.content)

"""The loss on the held-out tokens of a prepared folder, by the windows and the mean that training validates with."""

import dataclasses
import math
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from dualres.config.schema import ConfigError
from dualres.data import shards
from dualres.data.loader import Loader, sum_over_windows
from dualres.evaluate.batch_size import Batch
from dualres.evaluate.perplexity import Window, window_nats
from dualres.hub.open_model import TrainedModel
from dualres.util.errors import DataError
from dualres.util.progress import Show, short, silent


class ValidationScore(NamedTuple):
    """The mean cross-entropy of the next token."""

    loss: float  # nats per token
    tokens: int  # that were predicted
    context: int
    content: str  # of the prepared folder: the same for the same tokens


def validation_loss(
    subject: TrainedModel, data: Path, *, batch: Batch, tokens: int | None = None, show: Show = silent
) -> ValidationScore:
    """Of the `validation` split in the order of the text, in windows of the subject's context.

    At most `tokens` of them, in whole windows and at least one, as `train.validation_tokens` does; without it, all.
    Packed as in training: a token sees its window, whatever documents are in it.
    """
    if tokens is not None and tokens < 1:
        raise ConfigError(f"{tokens} tokens are too few to validate on: use 1 or more, or leave it out for all")
    index = shards.read_index(data)
    subject.check_tokens(data)
    shards.verify(data, dataclasses.replace(index, train=()), subject.vocab_size)
    context = subject.context
    loader = Loader(data, index, "validation", context, None)
    count = loader.windows_within(tokens)
    done, start = 0, time.monotonic()

    def batch_nats(sequences: Tensor) -> float:
        nonlocal done
        windows = [Window(number, row) for number, row in enumerate(sequences.numpy(), start=done + 1)]
        nats = 0.0
        for values in batch.over(windows, lambda piece: window_nats(subject, piece)):
            nats += math.fsum(values)
            done += len(values)
            rate = short(done * context / max(1e-9, time.monotonic() - start))
            show(f"validation  {short(done * context)}/{short(count * context)} tokens  {rate} tokens/s")
        if not math.isfinite(nats):
            raise DataError(
                f"{subject.name} gives a loss of {nats} in windows {windows[0].document} to {done} of {data}: look at "
                "its weights, or run it in another dtype, float32 say"
            )
        return nats

    nats = sum_over_windows(loader, count, max(1, batch.tokens // context), batch_nats)
    return ValidationScore(nats / (count * context), count * context, context, index.content)

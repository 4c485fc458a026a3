"""KL rescue: what each stream alone contributes to the prediction when the others are zeroed right after a layer's MLP.

R_{n,j} = 1 − KL(p_clean ‖ p_keep-j) / max(KL(p_clean ‖ p_zero-all), 1e-12), each KL the mean over the analyzed tokens.
"""
# B batch  T tokens  D width  J streams  L layers  V vocabulary  N analyzed tokens

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from dualres.analyze.taps import Change, Site, replacing
from dualres.model.attention import Context, token_positions
from dualres.model.block import ResidualBlock, after, embed
from dualres.model.decoder import Decoder
from dualres.residual.pathway import History
from dualres.util.progress import Show, silent

FLOOR = 1e-12
ROWS = 32  # tokens whose distributions are in memory at once


@torch.no_grad()
def kl_rescue(decoder: Decoder, sequences: Tensor, last: int, show: Show = silent) -> dict[str, Tensor]:
    """Rescue over the last `last` tokens of every sequence (B,T), one sequence at a time.

    KL(p_clean ‖ p_keep-j) (L,J), KL(p_clean ‖ p_zero-all) (L,), R (L,J) and, for two streams, R_{n,1} − R_{n,0} (L,).
    An intervention starts from the clean history before its block, so it costs only the rest of the network.
    """
    layers, streams = decoder.config.layers, decoder.stack.streams
    total = torch.zeros(layers, streams + 1, dtype=torch.float64)
    for number, row in enumerate(sequences):
        embedding = decoder.vocabulary.embed(row[None])
        context = decoder.context(embedding, token_positions(len(row), 0, None, row.device), mask=None)
        history, blocks = embed(embedding, streams), list(decoder.stack)
        clean = _logits(decoder, blocks, history, context, last)
        branches = itertools.count()
        for b, block in enumerate(blocks):
            for i in range(len(block.branches)):
                site = Site(b, i, next(branches))
                if not site.ends_layer:
                    continue
                done = (number * layers + site.layer) / (len(sequences) * layers)
                show(f"KL rescue  sequence {number + 1}/{len(sequences)}  layer {site.layer + 1}/{layers}", done)
                for case in range(streams + 1):
                    with replacing(block, i, keep_only(case)):
                        changed = after(block, history, context=context)
                    rest = _logits(decoder, blocks[b + 1 :], changed, context, last)
                    total[site.layer, case] += _kl_sum(clean, rest)
            history = after(block, history, context=context)
    mean = total / (len(sequences) * min(last, sequences.shape[1]))
    keep, none = mean[:, :streams], mean[:, streams]
    rescue = 1 - keep / none.clamp(min=FLOOR).unsqueeze(1)
    gaps = {"rescue_gaps": rescue[:, 1] - rescue[:, 0]} if streams == 2 else {}
    return {"kl_keep": keep, "kl_none": none, "rescue": rescue, **gaps}


def keep_only(stream: int) -> Change:
    """Zero all streams except one; an index past the last stream zeroes all of them."""

    def change(streams: Tensor) -> Tensor:
        changed = torch.zeros_like(streams)
        if stream < len(streams):
            changed[stream] = streams[stream]
        return changed

    return change


def _logits(decoder: Decoder, blocks: Sequence[ResidualBlock], history: History, context: Context, last: int) -> Tensor:
    """Logits of the last tokens after the remaining blocks. (N,V)"""
    for block in blocks:
        history = after(block, history, context=context)
    hidden = decoder.norm(decoder.stack.readout(*history))
    return decoder.vocabulary.logits(hidden[:, -last:]).flatten(0, 1)


def _kl_sum(clean: Tensor, changed: Tensor) -> float:
    """Σ_n KL(p_n ‖ q_n) for two sets of logits (N,V), in float64."""
    total = 0.0
    for p, q in zip(clean.split(ROWS), changed.split(ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += float((log_p.exp() * (log_p - log_q)).sum())
    return total

"""The loss of an interpolated bigram model on the held-out tokens: what a trained model must beat to have learned more.

    python benchmarks/bigram.py data/novels --tokens 2000000 --validation-tokens 200000

p(w | v) = λ_v · c(v,w)/c(v) + (1 − λ_v) · p(w), with λ_v = c(v) / (c(v) + κ · number of words seen after v) after
Witten and Bell, and p(w) the add-one unigram. κ is the best on the held-out tokens themselves, which favors the bigram
model. Counts come from the same sequences that a run with this number of tokens and this seed sees.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dualres.data.loader import Loader
from dualres.data.shards import read_index

KAPPAS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


def sequences(data: Path, split: str, context: int, tokens: int, seed: int | None) -> NDArray[np.int64]:
    """The sequences that training or validation on this number of tokens reads. -> (N,T+1)"""
    loader = Loader(data, read_index(data), "train" if split == "train" else "validation", context, seed)
    count = tokens // context if split == "train" else min(loader.windows, tokens // context)
    return loader.batch(0, count).numpy()


def bigram_loss(train: NDArray[np.int64], held_out: NDArray[np.int64], vocab_size: int) -> tuple[float, float]:
    """(N,T+1), (M,T+1) -> loss in nats per token, κ"""
    before, after = train[:, :-1].ravel(), train[:, 1:].ravel()
    unigram = (np.bincount(after, minlength=vocab_size) + 1) / (len(after) + vocab_size)
    pairs, counts = np.unique(before * vocab_size + after, return_counts=True)
    seen = np.bincount(before, minlength=vocab_size)  # c(v)
    kinds = np.bincount(pairs // vocab_size, minlength=vocab_size)  # different words after v
    v, w = held_out[:, :-1].ravel(), held_out[:, 1:].ravel()
    place = np.minimum(np.searchsorted(pairs, v * vocab_size + w), len(pairs) - 1)
    count = np.where(pairs[place] == v * vocab_size + w, counts[place], 0)
    best = (np.inf, 0.0)
    for kappa in KAPPAS:
        weight = seen[v] + kappa * kinds[v]  # λ_v · c(v,w)/c(v) = c(v,w) / (c(v) + κ · kinds)
        share = np.divide(count, weight, out=np.zeros(len(v)), where=weight > 0)
        rest = np.divide(kappa * kinds[v], weight, out=np.ones(len(v)), where=weight > 0)
        best = min(best, (float(-np.log(share + rest * unigram[w]).mean()), kappa))
    return best


def main() -> None:
    """Print the loss after counting the tokens that a run sees, and after counting all of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a folder written by `dualres prepare`")
    parser.add_argument("--tokens", type=int, required=True, help="training tokens of the run")
    parser.add_argument("--validation-tokens", type=int, default=200_000)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    index = read_index(args.data)
    held_out = sequences(args.data, "validation", args.context, args.validation_tokens, None)
    rows = {}
    for name, tokens, seed in (("same", args.tokens, args.seed), ("all", index.tokens("train"), None)):
        train = sequences(args.data, "train", args.context, min(tokens, index.tokens("train") - 1), seed)
        loss, kappa = bigram_loss(train, held_out, index.vocab_size)
        rows[name] = {"train_tokens": int(train[:, 1:].size), "loss": loss, "kappa": kappa}
    if args.json:
        print(json.dumps({"validation_tokens": int(held_out[:, 1:].size), **rows}))
    else:
        for row in rows.values():
            print(f"interpolated bigram, {row['train_tokens']:>11,} tokens: {row['loss']:.4f} nats (κ {row['kappa']})")


if __name__ == "__main__":
    main()

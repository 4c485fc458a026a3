"""How long a look inside a model takes, by part, and how much memory: fresh weights, random tokens.

python benchmarks/analyze.py 0.1b dar-block --length 512
"""

import argparse
import itertools
import resource
import time

import torch

from dualres.analyze.analysis import Protocol, analyze
from dualres.config.loading import load_config
from dualres.model.decoder import build_decoder
from dualres.util.progress import duration
from dualres.util.tables import table


def main() -> None:
    """Print seconds by part, the whole, and the peak memory of the process."""
    defaults = Protocol()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scale")
    parser.add_argument("residual")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=defaults.sequences)
    parser.add_argument("--retrieval-sequences", type=int, default=defaults.sequences)
    parser.add_argument("--last", type=int, default=defaults.last)
    given = parser.parse_args()
    config = load_config(given.scale, given.residual)
    decoder = build_decoder(config.model, config.residual)
    before = _peak()
    rows = max(given.sequences, given.retrieval_sequences)
    tokens = torch.randint(0, config.model.vocab_size, (rows, given.length), generator=torch.Generator().manual_seed(0))
    protocol = Protocol(given.sequences, given.last, given.retrieval_sequences)
    begun: list[tuple[str, float]] = [("watching", time.monotonic())]  # parts, and when

    def show(text: str) -> None:
        begun.append((text.partition("  ")[0], time.monotonic()))

    analyze(decoder, tokens, protocol, {}, show)
    show("end")
    seconds: dict[str, float] = {}
    for (part, start), (_, end) in itertools.pairwise(begun):
        seconds[part] = seconds.get(part, 0.0) + end - start
    size = f"{given.sequences} × {given.length} tokens"
    print(f"{given.scale} × {given.residual}, {size}, {torch.get_num_threads()} threads")
    lines: list[list[object]] = [[part, f"{spent:.1f}"] for part, spent in seconds.items()]
    print(table(["part", "seconds"], lines))
    print(f"in all {duration(begun[-1][1] - begun[0][1])}; peak memory {_peak():.2f} GiB, {before:.2f} of it the model")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()

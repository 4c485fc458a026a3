"""Time by part and peak memory of `dualres analyze`, with fresh weights and random tokens.

python benchmarks/analyze.py 0.1b dar-block --length 512
"""

import argparse
import itertools
import resource
import time

import torch

from dualres.analyze.analysis import AnalysisProtocol, analyze
from dualres.config.loading import load_config
from dualres.model.decoder import build_decoder
from dualres.util.progress import duration
from dualres.util.tables import table


def main() -> None:
    """Print seconds by part, the total, and the peak memory of the process."""
    defaults = AnalysisProtocol()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scale")
    parser.add_argument("residual")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--sequences", type=int, default=defaults.sequences)
    parser.add_argument("--retrieval-sequences", type=int, default=defaults.sequences)
    parser.add_argument("--last", type=int, default=defaults.last)
    args = parser.parse_args()
    config = load_config(args.scale, args.residual)
    decoder = build_decoder(config.model, config.residual)
    before = _peak()
    rows = max(args.sequences, args.retrieval_sequences)
    tokens = torch.randint(0, config.model.vocab_size, (rows, args.length), generator=torch.Generator().manual_seed(0))
    protocol = AnalysisProtocol(args.sequences, args.last, args.retrieval_sequences)
    starts: list[tuple[str, float]] = [("watching", time.monotonic())]  # of each part

    def show(text: str, fraction: float | None = None) -> None:
        starts.append((text.partition("  ")[0], time.monotonic()))

    analyze(decoder, tokens, protocol, {}, show)
    show("end")
    seconds: dict[str, float] = {}
    for (part, start), (_, end) in itertools.pairwise(starts):
        seconds[part] = seconds.get(part, 0.0) + end - start
    size = f"{args.sequences} × {args.length} tokens"
    print(f"{args.scale} × {args.residual}, {size}, {torch.get_num_threads()} threads")
    lines: list[list[object]] = [[part, f"{spent:.1f}"] for part, spent in seconds.items()]
    print(table(["part", "seconds"], lines))
    total = duration(starts[-1][1] - starts[0][1])
    print(f"total {total}; peak memory {_peak():.2f} GiB, {before:.2f} of it the model")


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


if __name__ == "__main__":
    main()

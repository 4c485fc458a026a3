"""Analyze residual streams: CKA, rescue, gates, retrieval, norms, experts.

Analyze the streams of each MODEL, a run folder or an exported model, on held-out tokens: cross-stream CKA,
KL rescue, write gates against rescue, depth retrieval, RMS of streams and states, expert load. Writes data
(analysis.json, analysis.npz) and figures (SVG, PNG) to MODEL/analysis, and figures that compare several
models to --out. A model already analyzed with the same settings is not analyzed again.
"""

import argparse
import dataclasses
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dualres.commands import arguments
from dualres.config.schema import ConfigError
from dualres.util.errors import DataError, ModelError
from dualres.util.optional_dependencies import available, missing
from dualres.util.progress import Progress
from dualres.util.tables import table

if TYPE_CHECKING:
    from dualres.analyze.analysis import Analysis

DEFAULT_OUT = Path("analyses")
MAX_LENGTH = 4096  # the paper's sequences
EPILOG = """\
Defaults follow the paper: 4 sequences of 4096 tokens (or the model's context length), using the last 128
tokens of each, and 8 full sequences for retrieval.

examples:
  dualres analyze runs/nano-dar-block
  dualres analyze dar=runs/nano-dar-full self=runs/nano-dar-selfkv --data data/python --out figures
  dualres analyze models/converted --data data/fineweb --sequences 2 --length 512
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", metavar="MODEL", nargs="+", help="PATH or NAME=PATH; figures use the name")
    add("--data", metavar="D", type=Path, help="prepared data (default: the run's training data)")
    add("--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help=f"output folder (default {DEFAULT_OUT})")
    add("--sequences", metavar="N", type=int, default=4, help="for CKA, rescue and gates (default 4)")
    add("--length", metavar="N", type=int, help=f"tokens per sequence (default: context length, at most {MAX_LENGTH})")
    add("--last", metavar="N", type=int, default=128, help="use the last N of each (default 128)")
    add(
        "--retrieval-sequences",
        metavar="N",
        type=int,
        default=8,
        help="full sequences for retrieval, RMS and experts (default 8)",
    )
    arguments.add_checkpoint(parser)
    arguments.add_device(parser)
    arguments.add_plugin(parser)


def run(args: argparse.Namespace) -> int:
    arguments.check_device(args)
    models = {name: Path(path) for name, path in arguments.parse_models(args.models).items()}
    arguments.check_positive(args, "sequences", "length", "last", "retrieval_sequences")
    if args.out.is_file():
        raise ConfigError(f"--out {args.out} is a file: use a folder")
    from dualres.analyze.analysis import FOLDER

    data = {name: _data_for(folder, args.data) for name, folder in models.items()}  # fail before the first analysis
    progress = Progress(args.verbosity)
    if not available("matplotlib"):
        progress.say(f"{missing('matplotlib', 'plots', 'drawing figures')}; writing their data only")
    analyses = {}
    for name, folder in models.items():
        analyses[name] = _analyze(name, folder, data[name], args, progress)
        gc.collect()  # free the model before loading the next
    progress.end()
    print(summary(analyses))
    outputs = [folder / FOLDER for folder in models.values()]
    if len(models) > 1 and available("matplotlib"):
        from dualres.analyze import figures

        progress.show("drawing all models together")
        figures.draw_together(analyses, args.out)
        outputs.append(args.out)
    progress.say(f"wrote {', '.join(map(str, outputs))}")
    return 0


def _data_for(folder: Path, data: Path | None) -> Path:
    """--data, or the data that the run was trained on. Raises if the folder has no dualres model."""
    from dualres.hub.model_folder import check_saved, read_saved
    from dualres.train.run_folder import is_run, read_description

    if not is_run(folder):
        check_saved(read_saved(folder))
    if data is not None:
        return data
    if not is_run(folder):
        raise ConfigError(f"{folder} is not a run: pass --data D, prepared with the model's tokenizer")
    data = Path(read_description(folder)["data"]["folder"])
    if not data.is_dir():
        raise ConfigError(f"the training data of {folder} is no longer in {data}: pass --data D")
    return data


def _analyze(name: str, folder: Path, data: Path, args: argparse.Namespace, progress: Progress) -> "Analysis":
    """Analyze one model, or read its analysis if the settings are the same."""
    import numpy as np

    from dualres.analyze.analysis import FOLDER, AnalysisProtocol, analyze, read_analysis, write_analysis
    from dualres.data import shards
    from dualres.data.loader import Loader
    from dualres.hub.open_model import open_model
    from dualres.ops import dispatch
    from dualres.train.metrics import METRICS, read_rows
    from dualres.util.version import VERSION

    index = shards.read_index(data)
    progress.show(f"{name}  loading")
    model = open_model(folder, checkpoint=args.checkpoint, device=args.device)
    model.require_tokenizer()
    model.check_tokens(data)
    decoder = model.decoder
    dispatch.announce(model.device, progress.say)
    shards.verify(data, dataclasses.replace(index, train=()), decoder.config.vocab_size)
    length = args.length or min(decoder.config.context, MAX_LENGTH)
    if length > decoder.config.context:
        raise ConfigError(f"--length {length} exceeds the context of {name}: use at most {decoder.config.context}")
    loader = Loader(data, index, "validation", length, None)
    needed = max(args.sequences, args.retrieval_sequences)
    if loader.windows < needed:
        raise DataError(
            f"the held-out split of {data} has {loader.windows} sequences of {length} tokens, but {needed} are needed: "
            f"lower --sequences and --retrieval-sequences to {loader.windows}, or lower --length"
        )
    protocol = AnalysisProtocol(args.sequences, args.last, args.retrieval_sequences)
    key = {
        "identity": model.identity,
        "content": index.content,
        "length": length,
        **protocol._asdict(),
        "dualres": VERSION,
    }
    try:
        previous = read_analysis(folder / FOLDER)
    except ConfigError as error:
        progress.say(f"{error}; doing so now")
        previous = None
    if previous is not None and previous.about.get("key") == key:
        progress.say(f"{name}: already analyzed; see {folder / FOLDER}")
        _draw(previous, folder / FOLDER)
        return previous
    about = {
        "model": name,
        "residual": decoder.residual_config.to_dict(),
        "data": data.resolve().name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "key": key,
    }
    try:
        rows = loader.batch(0, needed)[:, :-1]
        analysis = analyze(decoder, rows, protocol, about, progress.named(name))
    except FloatingPointError as error:
        raise ModelError(f"{folder}: {error}: check its weights") from None
    logged = read_rows(folder / METRICS) if (folder / METRICS).is_file() else []
    if curve := [(row["step"], row["router_loss"]) for row in logged if "router_loss" in row]:
        analysis.arrays["router_curve"] = np.array(curve, np.float64)
    write_analysis(folder / FOLDER, analysis)
    progress.show(f"{name}  drawing")
    _draw(analysis, folder / FOLDER, again=True)
    return analysis


def _draw(analysis: "Analysis", folder: Path, again: bool = False) -> None:
    """Draw the figures that are missing, or all of them `again`, if matplotlib is installed."""
    if not available("matplotlib"):
        return
    from dualres.analyze import figures

    if again or not figures.is_drawn(analysis, folder):
        figures.draw_one(analysis, folder)


def summary(analyses: "Mapping[str, Analysis]") -> str:
    """A table with the scalars of every model."""
    import numpy as np

    header = ["model", "streams", "CKA, same layer", "CKA, all", "rescue by stream", "|write gap|", "r", "divergence"]
    lines = []
    for name, analysis in analyses.items():
        scalars = analysis.summary
        rescue = analysis.arrays.get("rescue")
        means = "" if rescue is None else " / ".join(f"{value:.2f}" for value in np.nanmean(rescue, 0))
        keys = ("mean_cka_same_layer", "mean_cka", "mean_absolute_write_gap", "gap_correlation", "mean_divergence")
        same, every, gap, r, divergence = (f"{scalars[key]:.3f}" if key in scalars else "" for key in keys)
        lines.append([name, analysis.about["streams"], same, every, means, gap, r, divergence])
    return table(header, lines)

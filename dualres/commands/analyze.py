"""`dualres analyze`: analyze the residual streams of trained models."""

import argparse
import dataclasses
import gc
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualres.commands import arguments
from dualres.commands.evaluate import NamedModel, parse_models
from dualres.config.schema import ConfigError
from dualres.util.errors import DataError, ModelError
from dualres.util.progress import Progress
from dualres.util.tables import table
from dualres.util.version import VERSION

if TYPE_CHECKING:
    import numpy as np

    from dualres.analyze.analysis import Analysis

DEFAULT_OUT = Path("analyses")
MAX_LENGTH = 4096  # the paper's sequences


def add(commands: Any) -> None:
    sub = arguments.command(
        commands,
        "analyze",
        "analyze streams: CKA, rescue, gates, retrieval, norms, experts",
        "Analyze the streams of each MODEL, a run folder or an exported model, on held-out tokens: cross-stream CKA,\n"
        "KL rescue, write gates against rescue, depth retrieval, RMS of streams and states, expert load. Writes data\n"
        "(analysis.json, analysis.npz) and figures (SVG, PNG) to MODEL/analysis, and figures of several models side\n"
        "by side to --out. A model already analyzed with the same settings is not analyzed again.",
        "Defaults follow the paper: 4 sequences of 4096 tokens (or the model's context length), using the last 128\n"
        "tokens of each, and 8 full sequences for retrieval.\n\n"
        "examples:\n"
        "  dualres analyze runs/nano-dar-block\n"
        "  dualres analyze dar=runs/nano-dar-full self=runs/nano-dar-selfkv --data data/python --out figures\n"
        "  dualres analyze models/converted --data data/fineweb --sequences 2 --length 512",
    )
    sub.add_argument("models", metavar="MODEL", nargs="+", help="PATH or NAME=PATH; figures use the name")
    sub.add_argument("--data", metavar="D", type=Path, help="prepared data (default: the run's training data)")
    sub.add_argument(
        "--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help=f"output folder (default {DEFAULT_OUT})"
    )
    sub.add_argument("--sequences", metavar="N", type=int, default=4, help="for CKA, rescue, gates (default 4)")
    sub.add_argument(
        "--length", metavar="N", type=int, help=f"tokens per sequence (default: context length, at most {MAX_LENGTH})"
    )
    sub.add_argument("--last", metavar="N", type=int, default=128, help="tokens used of each (default 128)")
    sub.add_argument(
        "--retrieval-sequences",
        metavar="N",
        type=int,
        default=8,
        help="for retrieval, RMS and experts, with all tokens (default 8)",
    )
    arguments.checkpoint(sub)
    sub.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if available")
    sub.set_defaults(command=_analyze)


def _analyze(given: argparse.Namespace) -> int:
    models = parse_models(given.models)
    for option in ("sequences", "length", "last", "retrieval_sequences"):
        value = getattr(given, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option.replace('_', '-')} {value} is not positive: use 1 or more")
    if given.out.is_file():
        raise ConfigError(f"--out {given.out} is a file: name a folder")
    from dualres.analyze import figures
    from dualres.analyze.analysis import FOLDER
    from dualres.hub.model_folder import is_exported
    from dualres.train.run_folder import is_run

    for model in models:  # fail before the first analysis, which may take long
        if not is_run(Path(model.path)) and not is_exported(Path(model.path)):
            raise ModelError(f"{model.path} is neither a run folder nor an exported dualres model: pass one of them")
        _data_of(model, given.data)
    progress = Progress()
    analyses = {}
    for model in models:
        analyses[model.name] = _one(model, given, progress)
        gc.collect()  # free the model before loading the next
    print(summary(analyses))
    written = [Path(model.path) / FOLDER for model in models]
    if len(models) > 1:
        progress.show("drawing all models together")
        figures.draw_together(analyses, given.out)
        written.append(given.out)
    progress.say(f"written: {', '.join(str(path) for path in written)}")
    return 0


def summary(analyses: "Mapping[str, Analysis]") -> str:
    """The scalars of every model as a table."""
    import numpy as np

    header = ["model", "streams", "CKA, same layer", "CKA, all", "rescue by stream", "|write gap|", "r", "divergence"]
    lines = []
    for name, analysis in analyses.items():
        found = analysis.summary
        rescue = analysis.arrays.get("rescue")
        means = "" if rescue is None else " / ".join(f"{value:.2f}" for value in np.nanmean(rescue, 0))
        keys = ("mean_cka_same_layer", "mean_cka", "mean_absolute_write_gap", "gap_correlation", "mean_divergence")
        same, every, gap, r, divergence = (f"{found[key]:.3f}" if key in found else "" for key in keys)
        lines.append([name, analysis.about["streams"], same, every, means, gap, r, divergence])
    return table(header, lines)


def _one(model: NamedModel, given: argparse.Namespace, progress: Progress) -> "Analysis":
    """Analyze one model, or read its analysis if the settings are the same."""
    from dualres.analyze import figures
    from dualres.analyze.analysis import FOLDER, Protocol, analyze, write_analysis
    from dualres.data import shards
    from dualres.data.loader import Loader
    from dualres.hub.open_model import open_model
    from dualres.train.run_folder import is_run

    folder, data = Path(model.path), _data_of(model, given.data)
    index = shards.read_index(data)
    progress.show(f"{model.name}  loading")
    if not is_run(folder):
        arguments.hush()
    opened = open_model(folder, checkpoint=given.checkpoint, device=given.device)
    opened.require_tokenizer()
    opened.check_tokens(data)
    decoder = opened.decoder
    shards.verify(data, dataclasses.replace(index, train=()), decoder.config.vocab_size)
    length = given.length or min(decoder.config.context, MAX_LENGTH)
    if length > decoder.config.context:
        raise ConfigError(
            f"--length {length} exceeds the context of {model.name}: use at most {decoder.config.context}"
        )
    loader = Loader(data, index, "validation", length, None)
    wanted = max(given.sequences, given.retrieval_sequences)
    if loader.windows < wanted:
        raise DataError(
            f"the held-out split of {data} has {loader.windows} sequences of {length} tokens, {wanted} are requested: "
            f"lower --sequences and --retrieval-sequences to {loader.windows}, or lower --length"
        )
    protocol = Protocol(given.sequences, given.last, given.retrieval_sequences)
    key = {
        "identity": opened.identity,
        "content": index.content,
        "length": length,
        **protocol._asdict(),
        "dualres": VERSION,
    }
    before = _before(folder / FOLDER, progress)
    if before is not None and before.about.get("key") == key:
        progress.say(f"{model.name}: already analyzed, see {folder / FOLDER}")
        if not figures.is_drawn(before, folder / FOLDER):
            figures.draw_one(before, folder / FOLDER)
        return before
    about = {
        "model": model.name,
        "residual": decoder.residual_config.to_dict(),
        "data": data.resolve().name,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "device": opened.device.type,
        "key": key,
    }
    try:
        rows = loader.batch(0, wanted)[:, :-1]
        analysis = analyze(decoder, rows, protocol, about, lambda text: progress.show(f"{model.name}  {text}"))
    except FloatingPointError as error:
        raise ModelError(f"{folder}: {error}: check its weights") from None
    curve = _router_curve(folder)
    if curve is not None:
        analysis.arrays["router_curve"] = curve
    write_analysis(folder / FOLDER, analysis)
    progress.show(f"{model.name}  drawing")
    figures.draw_one(analysis, folder / FOLDER)
    return analysis


def _before(folder: Path, progress: Progress) -> "Analysis | None":
    """An earlier analysis, if it can be read."""
    from dualres.analyze.analysis import read_analysis

    try:
        return read_analysis(folder)
    except ConfigError as error:
        progress.say(f"{error} (running now)")
        return None


def _data_of(model: NamedModel, data: Path | None) -> Path:
    """--data, or the data that the run was trained on."""
    if data is not None:
        return data
    from dualres.train.run_folder import is_run, read_description

    folder = Path(model.path)
    if not is_run(folder):
        raise ConfigError(f"{model.path} is not a run: pass --data D, prepared with the model's tokenizer")
    found = Path(read_description(folder)["data"]["folder"])
    if not found.is_dir():
        raise ConfigError(f"the training data of {model.path} are no longer in {found}: pass --data D")
    return found


def _router_curve(folder: Path) -> "np.ndarray | None":
    """Auxiliary loss during a run's training, mean over layers. -> (steps,2): step, loss"""
    import numpy as np

    from dualres.train.metrics import METRICS, read_rows

    if not (folder / METRICS).is_file():
        return None
    rows: Sequence[Mapping[str, Any]] = read_rows(folder / METRICS)
    found = [(row["step"], row["router_loss"]) for row in rows if "router_loss" in row]
    return np.array(found, np.float64) if found else None

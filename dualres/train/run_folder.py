"""The folder of a run, which only one process group may use at a time.

RUN/config.json      the experiment, the data, the version of dualres, the initial model, the method's plugin
    provenance.json  commit, versions, machine and time of every start
    tokenizer.json   a copy of the data's tokenizer
    metrics.jsonl    losses, gradient norm and learning rate by step; identical in every rerun
    speed.jsonl      tokens/s and utilization by step
    tensorboard/     both, for TensorBoard
    wandb-id.txt     id of the Weights & Biases run, with --wandb
    checkpoints/     see dualres.train.checkpoint
    summary.json     written at the end
    verified.json    which data files were verified
    lock             held while a process trains
"""

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from dualres.config.plugins import REGISTERED
from dualres.config.schema import Config, ConfigError
from dualres.config.validation import build
from dualres.data.shards import TOKENIZER, Index
from dualres.residual import registry
from dualres.train.metrics import METRICS
from dualres.util.atomic_files import locked, write_bytes, write_json
from dualres.util.errors import TrainError
from dualres.util.version import VERSION

CONFIG, SUMMARY, CHECKPOINTS = "config.json", "summary.json", "checkpoints"
# Settings that affect how the work is done, not what is computed.
MAY_CHANGE = {
    "train.compile",
    "train.recompute",
    "train.loss_rows",
    "train.engine",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.untimed_steps",
    "train.timeout",
    "train.peak_flops",
    "analyze.every",
}


def may_change(key: str, config: Config) -> bool:
    """Whether a setting may change when a run of `config` resumes."""
    if key == "train.micro_batch":  # routers balance each micro-batch, so its size affects what an MoE model learns
        return config.model.moe is None
    return key in MAY_CHANGE or key.startswith("train.parallel.")


def lock_run(folder: Path) -> AbstractContextManager[None]:
    return locked(folder, TrainError(f"another process is training in {folder}: wait for it, or use a new folder"))


def has_started(folder: Path) -> bool:
    """Whether a run in `folder` has taken a step: if not, the next start may use a different config."""
    metrics = folder / METRICS
    return (metrics.exists() and metrics.stat().st_size > 0) or (folder / CHECKPOINTS).exists()


def is_run(folder: Path) -> bool:
    """Whether `dualres train` wrote the folder: by its config or, if that is damaged, by its other files."""
    try:
        read_description(folder)
    except (TrainError, OSError):
        return (folder / CONFIG).is_file() and has_started(folder)
    return True


def open_run(folder: Path, config: Config, data: Path, index: Index, start: Path | None = None) -> None:
    """Start a run in `folder`, or resume it; raise if config or data have changed.

    `start`: the exported model that provides the initial weights.
    """
    origin = {} if start is None else {"start": start.resolve().name}
    if has_started(folder):
        check_config(folder, config)
        check_data(folder, data, index)
        before = read_description(folder)
        origin = {"start": before["start"]} if "start" in before else {}
    write_bytes(folder / TOKENIZER, (data / TOKENIZER).read_bytes())
    used = {
        "folder": str(data),
        "content": index.content,
        "end_of_text": index.end_of_text,
        "fingerprint": index.fingerprint,
    }
    if config.residual.method in REGISTERED:
        origin["plugin"] = REGISTERED[config.residual.method]
    write_json(folder / CONFIG, {"dualres": VERSION, "config": _as_data(config), "data": used, **origin})


def check_data(folder: Path, data: Path, index: Index) -> None:
    """Reject data whose tokens differ from those of the run in `folder`; their path may change."""
    before = read_description(folder)["data"]
    if before["content"] != index.content:
        raise TrainError(
            f"the run in {folder} was trained on different data ({before['folder']}, now {data}): use that data, or a "
            "new folder"
        )


def check_config(folder: Path, config: Config) -> None:
    """Reject a config that would change what the run in `folder` computes."""
    differences = _differences(_as_data(read_config(folder)), _as_data(config))
    changed = [difference for difference in differences if not may_change(difference[0], config)]
    if changed:
        what = ", ".join(f"{key} {was!r} → {now!r}" for key, was, now in changed)
        settings = " ".join(f"--set {key}={was}" for key, was, _ in changed if was is not None)
        raise TrainError(
            f"the run in {folder} has a different config ({what}): use that config ({settings}), or a new folder"
        )


def read_description(folder: Path) -> dict[str, Any]:
    """The file that `open_run` wrote."""
    path = folder / CONFIG
    if not path.is_file():
        raise TrainError(f"{folder} has no {CONFIG}, which `dualres train` writes: restore it, or use another folder")
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        if not {"config", "data"} <= described.keys():
            raise ValueError("it lacks config or data")
    except (ValueError, AttributeError) as error:
        raise TrainError(f"{path} cannot be read ({error}): restore it, or train into a new folder") from None
    return described


def read_summary(folder: Path) -> dict[str, Any]:
    path = folder / SUMMARY
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise TrainError(
            f"{path} cannot be read ({error}): remove it and run the training command again to rewrite it"
        ) from None


def read_config(folder: Path) -> Config:
    """The experiment of a run. Keys that its version of dualres did not have take their defaults."""
    description = read_description(folder)
    try:
        config = build(Config, description["config"], "")
    except ConfigError as error:
        raise TrainError(f"{folder / CONFIG}: {error}; restore the file, or train into a new folder") from None
    registry.check_known(config.residual.method, description.get("plugin"), folder)
    return config


def _as_data(config: Config) -> dict[str, Any]:
    """The config as JSON returns it."""
    return json.loads(json.dumps(config.to_dict()))


def _differences(before: Any, now: Any, where: str = "") -> list[tuple[str, Any, Any]]:
    """(key, before, now) of every value that differs."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = list(dict.fromkeys([*before, *now]))
        inside = (_differences(before.get(key), now.get(key), f"{where}.{key}".lstrip(".")) for key in keys)
        return [difference for differences in inside for difference in differences]
    return [] if before == now else [(where, before, now)]

"""Checks before a run starts: each is ok, a note, or a problem with its remedy. Nothing is written."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from dualres.config.schema import Config, ConfigError
from dualres.data import shards
from dualres.data.loader import Loader
from dualres.data.shards import Index
from dualres.model.accounting import parameters
from dualres.model.decoder import meta_decoder
from dualres.parallel.pipeline import micro_batches
from dualres.train import checkpoint, run_folder
from dualres.train.engines.build import engine_mesh, engine_name
from dualres.train.loop import check_batch, check_vocabulary
from dualres.util.atomic_files import LOCK
from dualres.util.errors import DataError, TrainError
from dualres.util.optional_dependencies import MissingExtraError, available, missing

CHECKPOINT_BYTES = 12  # per parameter: the weight and two moments in float32
SMALL = 10**9  # tokens that can be read in seconds
SPARE_CHECKPOINTS = 2  # the best one, and the one being written
USED_BY_ENGINE = {  # fields of train.parallel
    "deepspeed": {"zero_stage"},
    "fsdp2": {"tensor", "pipeline", "virtual_stages", "expert", "context", "sequence_parallel"},
}


class Check(NamedTuple):
    name: str
    state: Literal["ok", "note", "problem"]
    details: str  # a key of the plan's JSON


Checked = Callable[[str, Callable[[], Check]], Check]  # the name of a check, and the check, which raises for a problem


def collect(name: str, check: Callable[[], Check]) -> Check:
    """Report a problem as a row."""
    try:
        return check()
    except (ConfigError, TrainError, DataError, MissingExtraError, OSError) as error:
        return Check(name, "problem", str(error))


def refuse(name: str, check: Callable[[], Check]) -> Check:
    """Raise for a problem."""
    return check()


def check_start(
    config: Config,
    ranks: int,
    data: Path,
    out: Path,
    *,
    prepares_data: bool = False,
    wandb: bool = False,
    checked: Checked = collect,
) -> list[Check]:
    """What would keep the run from starting here, and what the user should know first.

    `prepares_data`: whether training prepares missing data itself.
    """
    rows = [checked("mesh", lambda: _mesh(config, ranks))]
    if rows[0].state != "problem":
        rows.append(checked("batch", lambda: _batch(config, ranks)))
    rows.append(checked("engine", lambda: _engine(config, ranks)))
    if wandb:
        rows.append(checked("wandb", lambda: _package("wandb", "wandb", "--wandb")))
    index, checks = _data(config, data, prepares_data, checked)
    rows += checks
    rows.append(checked("run folder", lambda: _run_folder(config, data, out, index)))
    rows.append(checked("disk", lambda: _disk(config, out)))  # the last one, see `check_plan`
    return [row for row in rows if row.details]


def check_plan(
    config: Config, ranks: int, data: Path, out: Path, *, prepares_data: bool = False, wandb: bool = False
) -> list[Check]:
    """`check_start` of a run that may start on other machines, and the checksums, which a start verifies itself."""
    rows = check_start(config, ranks, data, out, prepares_data=prepares_data, wandb=wandb)
    here = torch.cuda.device_count()
    if rows[-1].state == "problem" and ranks > max(1, here):  # the disk of a machine that only plans does not matter
        rows[-1] = Check("disk", "note", f"on this machine: {rows[-1].details}")
    if here < ranks:
        instead = (
            "it would train on the CPU, slower than estimated" if ranks == 1 else "launch it on machines that have them"
        )
        rows.append(Check("GPUs", "note", f"{here} on this machine, {ranks} in the plan: {instead}"))
    if any(row.name == "vocabulary" for row in rows):  # there is an index
        rows.append(collect("checksums", lambda: _checksums(config, data)))
    return rows


def unused_mesh(config: Config, engine: str) -> str | None:
    """The fields of `train.parallel` that are set but not used by this engine."""
    parallel = config.train.parallel
    used = USED_BY_ENGINE.get(engine, set())
    ignored = {
        field.name: getattr(parallel, field.name)
        for field in dataclasses.fields(parallel)
        if field.name not in used and getattr(parallel, field.name) != field.default
    }
    if not ignored:
        return None
    others = f"{engine} shards no model, which gives the same results"
    why = "only DeepSpeed uses it" if ignored.keys() == {"zero_stage"} else others
    settings = ", ".join(f"{name}={value}" for name, value in ignored.items())
    return f"train.parallel {settings} is ignored by {engine}: {why}"


def engine_or_configured(config: Config, ranks: int) -> str:
    """The engine for `ranks` ranks; if it cannot run them, the configured one."""
    try:
        return engine_name(config, ranks)
    except TrainError:
        return config.train.engine


def _mesh(config: Config, ranks: int) -> Check:
    engine_mesh(config, ranks)
    unused = unused_mesh(config, engine_or_configured(config, ranks))
    return Check("mesh", "note" if unused else "ok", unused or "")


def _batch(config: Config, ranks: int) -> Check:
    check_batch(config, ranks)
    train, mesh = config.train, engine_mesh(config, ranks)
    steps = micro_batches(train.global_batch, train.micro_batch, mesh)
    padding = steps * mesh.data - train.global_batch // train.micro_batch
    message = f"{train.global_batch} = {mesh.data} ranks × {train.micro_batch} × {steps} micro-batches"
    if padding:
        return Check("batch", "note", f"{message}, padded with {padding} zero-weight micro-batches")
    return Check("batch", "ok", message)


def _engine(config: Config, ranks: int) -> Check:
    name = engine_name(config, ranks)
    if name != "deepspeed":
        return Check("engine", "ok", name)
    return _package("deepspeed", "deepspeed", "train.engine=deepspeed")._replace(name="engine")


def _package(name: str, extra: str, purpose: str) -> Check:
    if not available(name):
        raise MissingExtraError(missing(name, extra, purpose))
    return Check(name, "ok", f"{name} is installed")


def _data(config: Config, data: Path, prepares_data: bool, checked: Checked) -> tuple[Index | None, list[Check]]:
    context = config.model.context
    other = other_dataset(config) if prepares_data else ""
    if prepares_data and not (data / shards.INDEX).exists():
        message = f"{data} does not exist: training will prepare it from Python's standard library{other}"
        return None, [Check("data", "note", message)]
    read: list[Index] = []

    def source() -> Check:
        read.append(shards.read_index(data))
        return Check("data", "note" if other else "ok", f"{data}: from {read[0].source}{other}")

    first = checked("data", source)
    if not read:
        return None, [first]
    [index] = read

    def vocabulary() -> Check:
        check_vocabulary(config, data, index)
        return Check("vocabulary", "ok", f"{index.vocab_size:,} of the model's {config.model.vocab_size:,} entries")

    def budget() -> Check:
        windows = Loader(data, index, "train", context, config.train.seed).windows
        passes = config.steps * config.train.global_batch / windows
        message = (
            f"{f'{passes:,.0f}' if passes >= 100 else f'{passes:.3g}'} epochs over {index.tokens('train'):,} tokens"
        )
        ok = Check("tokens", "ok", message)
        return ok if passes <= 1 else Check("tokens", "note", f"{message}: prepare more data to see each token once")

    def held_out() -> Check:
        held = Loader(data, index, "validation", context, None).windows * context
        needed = max(1, config.train.validation_tokens // context) * context
        if held >= needed:
            return Check("validation", "ok", f"{needed:,} of {held:,} tokens")
        message = f"{held:,} tokens, fewer than the {needed:,} of train.validation_tokens"
        return Check("validation", "note", message)

    checks = {"vocabulary": vocabulary, "tokens": budget, "validation": held_out}
    return index, [first, *(checked(name, work) for name, work in checks.items())]


def _checksums(config: Config, data: Path) -> Check:
    index = shards.read_index(data)
    if index.tokens("train") > SMALL:
        return Check("checksums", "note", "too many tokens to verify now: training verifies them at startup")
    shards.verify(data, index, max(config.model.vocab_size, index.vocab_size))  # the vocabulary has its own row
    return Check("checksums", "ok", "all checksums match")


def other_dataset(config: Config) -> str:
    """A hint if the default data is not the recipe's dataset."""
    dataset = config.train.dataset
    return "" if dataset == "local" else f"; the recipe's dataset is {dataset}: prepare it and pass --data"


def _run_folder(config: Config, data: Path, out: Path, index: Index | None) -> Check:
    if not (_nearest_existing(out).is_dir() and os.access(_nearest_existing(out), os.W_OK)):
        raise TrainError(f"{_nearest_existing(out)} is not a writable folder: use a different --out")
    if (out / LOCK).exists():
        with run_folder.lock_run(out):
            pass  # no process is training in it
    checkpoints = checkpoint.complete_checkpoints(out / run_folder.CHECKPOINTS)
    if not run_folder.has_started(out):
        return Check("run folder", "ok", f"{out} is new")
    run_folder.check_config(out, config)
    if index is not None:
        run_folder.check_data(out, data, index)
    if not checkpoints:
        return Check("run folder", "ok", f"{out} has no checkpoint yet: it starts at the first step")
    if checkpoints[-1].name == checkpoint.step_name(config.steps):
        return Check("run folder", "note", f"{out} is finished, with {checkpoints[-1].name}: nothing is left to train")
    return Check("run folder", "ok", f"{out} resumes from {checkpoints[-1].name} of {config.steps:,} steps")


def _disk(config: Config, out: Path) -> Check:
    """Compare the free space with the checkpoints that will exist at once, minus those that already exist."""
    train, done = config.train, checkpoint.complete_checkpoints(out / run_folder.CHECKPOINTS)
    if done and done[-1].name == checkpoint.step_name(config.steps):
        return Check("disk", "ok", "a finished run saves nothing more")
    saves = 1 + config.steps // train.checkpoint_every + config.steps // train.validate_every
    count = min(saves, train.keep_checkpoints + SPARE_CHECKPOINTS)
    stored = sum(path.stat().st_size for path in (out / run_folder.CHECKPOINTS).rglob("*") if path.is_file())
    size = parameters(meta_decoder(config.model, config.residual)).total
    needed = max(0, count * CHECKPOINT_BYTES * size - stored)
    free = shutil.disk_usage(_nearest_existing(out)).free
    message = f"{needed / 2**30:.1f} GiB for {count} checkpoints, {free / 2**30:.1f} GiB free at {out}"
    if free < needed:
        raise TrainError(f"{message}: free space, lower train.keep_checkpoints, use a different --out, or use --force")
    return Check("disk", "ok", message)


def _nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    return next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())

"""Runs that take a second or two: a tiny model on a tiny part of the Python language reference, in bytes."""

import contextlib
import json
import os
import pydoc_data.topics
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from dualres.config.loading import load_config
from dualres.config.schema import Config
from dualres.data.prepare import Settings, prepare
from dualres.train import run_folder
from dualres.train.checkpoint import complete_checkpoints
from dualres.train.loop import TrainResult, train
from dualres.train.metrics import METRICS
from dualres.train.process_group import World
from dualres.util.progress import Progress

ROOT = Path(__file__).parents[2]
ALONE = World(0, 1, torch.device("cpu"), None, None)
STEPS = 40
TINY = {
    "model.layers": 2,
    "model.width": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.vocab_size": 257,
    "model.context": 32,
    "train.micro_batch": 2,
    "train.global_batch": 4,
    "train.tokens": STEPS * 4 * 32,
    "train.warmup_steps": 4,
    "train.validation_tokens": 7 * 32,  # no multiple of the micro-batch
    "train.validate_every": 10,
    "train.checkpoint_every": 4,
    "train.keep_checkpoints": 2,
    "train.untimed_steps": 1,
    "train.peak_flops": 1e10,
}
FEEDFORWARDS = {
    "dense": ("nano", {"model.ffn_width": 64}),
    "moe": ("nano-moe", {"model.moe.experts": 4, "model.moe.active": 2, "model.moe.expert_width": 16}),
}


def overrides(feedforward: str = "dense", **changes: Any) -> list[str]:
    """KEY=VALUE, with `__` for the dots of a key in `changes`."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return [f"{key}={value}" for key, value in {**TINY, **FEEDFORWARDS[feedforward][1], **dotted}.items()]


def tiny_config(residual: str = "dar-block", feedforward: str = "dense", **changes: Any) -> Config:
    return load_config(FEEDFORWARDS[feedforward][0], residual, overrides(feedforward, **changes))


def tiny_data(folder: Path, topics: int = 100) -> Path:
    """So many topics of the language reference, as bytes."""
    source = folder / "topics.jsonl"
    texts = sorted(pydoc_data.topics.topics.items())[:topics]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for _, text in texts), encoding="utf-8")
    prepare(Settings(str(source), "bytes", held_out=0.1), folder / "data")
    return folder / "data"


class Told(Progress):
    """Keeps what a run says, and does something when it shows a step."""

    def __init__(self, step: int = 0, act: Callable[[], None] = lambda: None):
        super().__init__(muted=True)
        self.said: list[str] = []
        self.step, self.act = step, act

    def say(self, text: str) -> None:
        self.said.append(text)

    def warn(self, text: str) -> None:
        self.said.append(text)

    def show(self, text: str, fraction: float | None = None) -> None:
        if text.startswith(f"step {self.step}/"):
            self.act()


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def train_tiny(config: Config, data: Path, folder: Path, progress: Progress | None = None) -> TrainResult:
    return train(config, data, folder, ALONE, progress or Told())


def metrics(folder: Path) -> str:
    return (folder / METRICS).read_text(encoding="utf-8")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in metrics(folder).splitlines()]


def losses(folder: Path) -> list[float]:
    """Of training and validation, in the order of the run."""
    return [row[key] for row in rows(folder) for key in ("loss", "validation_loss") if key in row]


def checkpoints(folder: Path) -> list[Path]:
    return complete_checkpoints(folder / run_folder.CHECKPOINTS)


def launch(
    data: Path,
    folder: Path,
    *,
    ranks: int = 1,
    restarts: int = 0,
    agent: Sequence[str] = ("--standalone",),
    program: str = "dualres",
    residual: str = "dar-block",
    limit: Any = None,
    **changes: Any,
) -> subprocess.Popen[str]:
    """`dualres train` as a user starts it, in a session of its own; its output goes to `folder`.log.

    `agent`: what `torchrun` is told of the others. `program`: a module that takes the same arguments.
    """
    torchrun = ["-m", "torch.distributed.run", *agent, f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
    many = torchrun if ranks > 1 or "--standalone" not in agent else []
    command = [sys.executable, *many, "-m", program, "train", "nano", residual]
    command += ["--data", str(data), "--out", str(folder), "--device", "cpu"]
    for override in overrides(**changes):
        command += ["--set", override]
    with folder.with_name(folder.name + ".log").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=limit,
        )


def said(folder: Path) -> str:
    return folder.with_name(folder.name + ".log").read_text(encoding="utf-8")


def descendants(pid: int) -> list[int]:
    """The process and all that it started, directly or not."""
    parents: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(status.parent.name))
    family, at = [pid], 0
    while at < len(family):
        family += parents.get(family[at], [])
        at += 1
    return family


def kill_all(process: subprocess.Popen[str]) -> None:
    """SIGKILL: no process has a chance to tidy up."""
    for pid in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()

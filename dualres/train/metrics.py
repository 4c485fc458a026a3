"""Metrics of a run: reproducible JSON lines, throughput, TensorBoard and Weights & Biases."""

import contextlib
import json
import resource
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dualres.config.schema import Config
from dualres.model.accounting import flops_per_token
from dualres.model.decoder import meta_decoder
from dualres.util.atomic_files import flush, naming, write_text
from dualres.util.errors import TrainError
from dualres.util.optional_dependencies import available, need

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS, SPEED, TENSORBOARD, WANDB_ID = "metrics.jsonl", "speed.jsonl", "tensorboard", "wandb-id.txt"
MEASURED_WIDTH, MEASURED_SECONDS = 1024, 0.3
RECENT = 20  # steps; the live throughput is their median


class Log:
    """Appends rows after `step`; rows of later steps, left by an interrupted run, are removed first."""

    def __init__(self, folder: Path, step: int, say: Callable[[str], None], wandb_project: str | None = None):
        self.folder, self.say = folder, say
        self.files = {}
        for name in (METRICS, SPEED):
            truncate(folder / name, step)
            self.files[name] = (folder / name).open("a", encoding="utf-8")
        self.board: SummaryWriter | None = None
        if available("tensorboard"):
            from torch.utils import tensorboard

            with self._optional_board():
                self.board = tensorboard.SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1)
        self.wandb = _wandb(folder, wandb_project) if wandb_project else None

    def write(self, name: str, step: int, **values: Any) -> None:
        """Log values that depend only on config and data to METRICS, and those that depend on the machine to SPEED."""
        try:
            self.files[name].write(json.dumps({"step": step, **values}) + "\n")
            self.files[name].flush()
        except OSError as error:
            raise TrainError(
                f"{self.folder / name} cannot be written ({error}): free disk space and run the same command again to "
                "resume from the last checkpoint"
            ) from None
        with self._optional_board():
            for key, value in values.items():
                if self.board is not None:
                    self.board.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(values, step=step)

    @contextlib.contextmanager
    def _optional_board(self) -> Iterator[None]:
        """TensorBoard only displays the rows: if it cannot be written, the run continues without it."""
        try:
            yield
        except OSError as error:
            self.board = None
            self.say(
                f"{self.folder / TENSORBOARD} cannot be written ({error}): continuing without it; {METRICS} is complete"
            )

    def sync(self) -> None:
        """Flush to disk, before a checkpoint that relies on the rows."""
        for name, file in self.files.items():
            with naming(self.folder / name):
                flush(file)

    def close(self) -> None:
        for file in (*self.files.values(), self.board):
            with contextlib.suppress(OSError):  # a full disk was reported by the write
                if file is not None:
                    file.close()
        if self.wandb is not None:
            self.wandb.finish()


def truncate(path: Path, step: int) -> None:
    """Keep the rows up to `step`, and nothing from the first row that a crash left incomplete."""
    if not path.exists():
        return
    rows = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _row(line)
            if row is None or row["step"] > step:
                break
            rows.append(line)
    write_text(path, "".join(rows))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a JSON-lines file."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return [row for line in file if (row := _row(line)) is not None]


def _row(line: str) -> dict[str, Any] | None:
    """The row; None if a crash has left half a line, or zeros."""
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None


def _wandb(folder: Path, project: str) -> Any:
    wandb = need("wandb", "wandb", "logging to Weights & Biases")
    name = folder / WANDB_ID  # not the folder's name: two runs in different places may share it
    if not name.exists():
        write_text(name, uuid.uuid4().hex)
    return wandb.init(project=project, name=folder.name, dir=str(folder), id=name.read_text(), resume="allow")


class Throughput:
    """Step times. The first `untimed_steps` of a process compile and warm up, so `overall` excludes them."""

    def __init__(self, config: Config, device: torch.device, processes: int):
        self.tokens = config.tokens_per_step
        decoder = meta_decoder(config.model, config.residual)
        # A backward pass takes twice the flops of a forward pass. Recomputation does not count as utilization.
        self.flops = 3 * flops_per_token(decoder).total * self.tokens
        self.peak = processes * (config.train.peak_flops or measured_flops(device, config.train.precision))
        self.untimed = config.train.untimed_steps
        self.seconds: list[float] = []
        self.began = 0.0

    def start(self) -> None:
        self.began = time.perf_counter()

    def stop(self) -> None:
        """Call this after the losses were read, when the device has finished."""
        self.seconds.append(time.perf_counter() - self.began)

    @property
    def step_seconds(self) -> float:
        """The median of recent steps, which hides outliers."""
        return statistics.median(self.seconds[-RECENT:])

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.step_seconds

    @property
    def utilization(self) -> float:
        """Model flops per second over the hardware's peak (MFU)."""
        return self.flops / self.step_seconds / self.peak

    def overall(self) -> float | None:
        """Tokens per second of all timed steps; None if there were none."""
        timed = self.seconds[self.untimed :]
        return len(timed) * self.tokens / sum(timed) if timed else None


def measured_flops(device: torch.device, precision: str) -> float:
    """Flops per second of a large matrix product on this device: an upper bound for a model's."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    width = MEASURED_WIDTH if device.type == "cpu" else 8 * MEASURED_WIDTH
    a = torch.ones(width, width, dtype=dtype, device=device)
    best = 0.0
    end = time.perf_counter() + MEASURED_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        best = max(best, 2 * width**3 / (time.perf_counter() - start))
    return best


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process: allocated on the GPU, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024

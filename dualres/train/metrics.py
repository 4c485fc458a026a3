"""Metrics of a run: JSON lines that repeat bit for bit, the clock beside them, TensorBoard and Weights & Biases."""

import contextlib
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from dualres.util.atomic_files import flush, naming, write_text
from dualres.util.errors import TrainError
from dualres.util.optional_dependencies import need

METRICS, SPEED, TENSORBOARD, WANDB_ID = "metrics.jsonl", "speed.jsonl", "tensorboard", "wandb-id.txt"


class Log:
    """Writes the rows of a run from `step` on; rows of later steps, left by an interrupted run, go first."""

    def __init__(self, folder: Path, step: int, say: Callable[[str], None], wandb_project: str | None = None):
        self.folder, self.say = folder, say
        for name in (METRICS, SPEED):
            cut(folder / name, step)
        self.metrics = (folder / METRICS).open("a", encoding="utf-8")
        self.speed = (folder / SPEED).open("a", encoding="utf-8")
        self.board: SummaryWriter | None = None
        with self._viewing():
            self.board = SummaryWriter(str(folder / TENSORBOARD), purge_step=step + 1)
        self.wandb = _wandb(folder, wandb_project) if wandb_project else None

    def metric(self, step: int, **values: Any) -> None:
        """A row that depends only on config and data."""
        self._write(self.metrics, METRICS, step, values)

    def clock(self, step: int, **values: Any) -> None:
        """A row that depends on the machine."""
        self._write(self.speed, SPEED, step, values)

    def _write(self, file: Any, name: str, step: int, values: dict[str, Any]) -> None:
        try:
            file.write(json.dumps({"step": step, **values}) + "\n")
            file.flush()
        except OSError as error:
            raise TrainError(
                f"{self.folder / name} cannot be written ({error}): free space there and run the same command again, "
                "it resumes from the last checkpoint"
            ) from None
        with self._viewing():
            for key, value in values.items():
                if self.board is not None:
                    self.board.add_scalar(key, value, step)
        if self.wandb is not None:
            self.wandb.log(values, step=step)

    @contextlib.contextmanager
    def _viewing(self) -> Iterator[None]:
        """TensorBoard is a view of the rows: where it cannot be written, the run goes on without."""
        try:
            yield
        except OSError as error:
            self.board = None
            self.say(f"{self.folder / TENSORBOARD} cannot be written ({error}): going on without; {METRICS} has it all")

    def sync(self) -> None:
        """Bring the rows to the disk, before a checkpoint that counts on them."""
        for file, name in ((self.metrics, METRICS), (self.speed, SPEED)):
            with naming(self.folder / name):
                flush(file)

    def close(self) -> None:
        """End all. What a full disk does not take was said when it was written."""
        for file in (self.metrics, self.speed, self.board):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        if self.wandb is not None:
            self.wandb.finish()


def cut(path: Path, step: int) -> None:
    """Keep the rows up to `step`; a row that a crash cut short goes with those after."""
    if not path.exists():
        return
    kept = []
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            row = _row(line)
            if row is None or row["step"] > step:
                break
            kept.append(line)
    write_text(path, "".join(kept))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a file of JSON lines."""
    with path.open(encoding="utf-8", errors="replace") as file:
        return [row for line in file if (row := _row(line)) is not None]


def _row(line: str) -> dict[str, Any] | None:
    """None where a crash has left half a line, or zeros."""
    try:
        return json.loads(line) if line.endswith("\n") else None
    except ValueError:
        return None


def _wandb(folder: Path, project: str) -> Any:
    wandb = need("wandb", "wandb", "logging to Weights & Biases")
    name = folder / WANDB_ID  # of its own: folders of two places may have one name
    if not name.exists():
        write_text(name, uuid.uuid4().hex)
    return wandb.init(project=project, name=folder.name, dir=str(folder), id=name.read_text(), resume="allow")

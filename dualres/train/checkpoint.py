"""Checkpoints: atomic, verified before they are loaded, and written while training continues.

checkpoints/step-000000100/
  weights/        safetensors, one or more files per rank; tensor names start with `model.`
  optimizer/      the same for AdamW's state
  state.json      step, position in the data, random state, best validation loss
  manifest.json   size and checksum of every other file; written last, before the folder is renamed into place
"""

import functools
import hashlib
import json
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dualres.train.process_group import World
from dualres.util.atomic_files import PARTIAL, flush, flush_folder, partial_of, write_json
from dualres.util.errors import TrainError

MANIFEST, STATE, DAMAGED = "manifest.json", "state.json", ".damaged"
PARTS = {"weights": "model.", "optimizer": "optimizer."}  # folder: prefix of the names in it


class Checkpoints:
    """The checkpoints of one run. All ranks call `save`, `wait` and `restore` together."""

    def __init__(self, folder: Path, world: World, keep: int, say: Callable[[str], None]):
        self.folder, self.world, self.keep, self.say = folder, world, keep, say
        _accept_single_process()
        self.saving: threading.Thread | None = None
        self.failure: str | None = None  # of the latest save
        self.desynchronized = False  # whether it failed in a collective, after which the ranks can no longer save

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Copy the tensors now and write them in the background. The checkpoint of `state["best_step"]` is kept."""
        self.wait()
        if self.desynchronized:
            raise RuntimeError(f"{self.failure}; the ranks can no longer save together: run the same command to resume")
        copy = DefaultStager(StagingOptions(False, False, False, False)).stage(tensors)
        self.world.busy.set()
        self.saving = threading.Thread(target=self._write, args=(step, copy, state), name="checkpoint")
        self.saving.start()

    def wait(self) -> None:
        """Wait for the latest save; `failure` is None if it succeeded."""
        if self.saving is not None:
            self.saving.join()
            self.saving = None

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Any] | None:
        """Load the newest intact checkpoint into `tensors` and return its state; None if there is none.

        A checkpoint that fails its checksums is renamed, and the previous one is used.
        """
        world = self.world
        if world.is_main:
            for leftover in self.folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(leftover, ignore_errors=True)
        while (newest := world.broadcast(self.last())) is not None:
            shares = world.gather_or_raise(functools.partial(damage, newest, world.rank, world.size))
            faults = [fault for share in shares for fault in share]
            if not faults:
                load(newest, tensors, distributed=world.size > 1)
                return json.loads((newest / STATE).read_text(encoding="utf-8"))
            if world.is_main:
                renamed = newest.with_name(newest.name + DAMAGED)
                shutil.rmtree(renamed, ignore_errors=True)
                newest.rename(renamed)
            self.say(f"checkpoint {newest} is damaged: {faults[0]}; renamed to *{DAMAGED}, using the previous one")
        return None

    def last(self) -> Path | None:
        return next(reversed(complete_checkpoints(self.folder)), None)

    def _write(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        target = self.folder / step_name(step)
        partial = partial_of(target)
        group = self.world.saving
        world = self.world._replace(control=group)  # the main thread uses the other group
        self.failure = None
        try:
            world.on_main(lambda: self._begin(partial))
            for part, chosen in _parts(tensors):
                writer = HuggingFaceStorageWriter(str(partial / part), save_distributed=True)
                state_dict_saver.save(chosen, storage_writer=writer, process_group=group, no_dist=group is None)
            world.on_main(lambda: write_json(partial / STATE, state))
            sums = world.gather_or_raise(lambda: _sums(partial, world))
            world.on_main(lambda: self._finish(partial, target, sums))
        except (Exception, CheckpointException) as error:  # PyTorch's is not an Exception
            self.failure = f"checkpoint {target} was not saved: {_reason(error)}"
            self.desynchronized = group is not None and isinstance(_root_cause(error), RuntimeError)
            if world.is_main:
                shutil.rmtree(partial, ignore_errors=True)
                disk = "; is the disk full?" if isinstance(_root_cause(error), OSError) else ""
                self.say(f"{self.failure}. Earlier checkpoints are unchanged{disk}")
        else:
            if world.is_main:
                self._remove_old(state)
        finally:
            world.busy.clear()

    def _begin(self, partial: Path) -> None:
        # Not `atomic_files.new_folder`: all ranks write the folder, and flush and checksum their files.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    def _finish(self, partial: Path, target: Path, sums: list[dict[str, Any]]) -> None:
        """Write the manifest and rename the folder into place."""
        files = {name: entry for share in sums for name, entry in share.items()}
        write_json(partial / MANIFEST, {"files": dict(sorted(files.items()))})
        for folder in (*(partial / part for part in PARTS if (partial / part).exists()), partial):
            flush_folder(folder)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        flush_folder(self.folder)

    def _remove_old(self, state: dict[str, Any]) -> None:
        """Keep the newest checkpoints and the best one."""
        for old in complete_checkpoints(self.folder)[: -self.keep]:
            if old.name == step_name(state["best_step"]):
                continue
            try:
                shutil.rmtree(old.rename(partial_of(old)))  # a partly removed folder must not look like a checkpoint
            except OSError as error:
                self.say(f"cannot remove the old checkpoint {old} ({error}): remove {partial_of(old)} by hand")


def step_name(step: int) -> str:
    return f"step-{step:09d}"


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.suffix == "" and path.is_dir())


def _parts(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of each folder of a checkpoint."""
    for part, prefix in PARTS.items():
        chosen = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
        if chosen:  # there may be no optimizer state
            yield part, chosen


def load(checkpoint: Path, tensors: dict[str, Tensor], distributed: bool = False) -> None:
    """Fill `tensors` from the parts of a checkpoint, written by any number of ranks."""
    for part, chosen in _parts(tensors):
        if not (checkpoint / part).is_dir():
            raise TrainError(
                f"checkpoint {checkpoint} has no {part}, since it was imported: export it, and start a new run from "
                "the exported folder with --from"
            )
        remedy = "Train with the config it was saved with, or into a new folder"
        _load(checkpoint / part, chosen, distributed, f"checkpoint {checkpoint} does not fit this model", remedy)


def load_initial_weights(folder: Path, tensors: dict[str, Tensor], distributed: bool = False) -> None:
    """Fill the weights among `tensors` from an exported model; leave the optimizer's state unchanged."""
    prefix = PARTS["weights"]
    chosen = {f"decoder.{name.removeprefix(prefix)}": t for name, t in tensors.items() if name.startswith(prefix)}
    remedy = "Use the model.… and residual.… of the folder's config"
    _load(folder, chosen, distributed, f"the weights of {folder} do not fit this model", remedy)


def _accept_single_process() -> None:
    """Silence PyTorch's warning that there is no process group: a single process needs none."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


def _load(folder: Path, tensors: dict[str, Tensor], distributed: bool, failure: str, remedy: str) -> None:
    _accept_single_process()
    try:
        state_dict_loader.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=not distributed)
    except (Exception, CheckpointException) as error:
        if distributed and isinstance(error, RuntimeError):
            raise  # another rank is unresponsive
        raise TrainError(f"{failure}: {_reason(error)}. {remedy}") from None


def damage(checkpoint: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """The faults of a checkpoint: files that are missing, differ in size or content, or are not in the manifest.

    Each of `ranks` ranks checks some of the files.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        listed = [(name, int(size), checksum) for name, (size, checksum) in sorted(manifest.items())]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{checkpoint / MANIFEST} cannot be read ({error})"]
    # PyTorch reads every safetensors file in the folder.
    weight_files = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*.safetensors")}
    faults = [f"{checkpoint / name} is not in the manifest" for name in sorted(weight_files - manifest.keys())]
    if STATE not in manifest:
        faults.append(f"{checkpoint / MANIFEST} does not list {STATE}")
    for name, size, checksum in listed[rank::ranks]:
        path = checkpoint / name
        if not path.is_file():
            faults.append(f"{path} is missing")
        elif path.stat().st_size != size:
            faults.append(f"{path} has {path.stat().st_size:,} bytes, not {size:,}")
        elif _sum(path) != checksum:
            faults.append(f"the checksum of {path} has changed")
    return faults


def _sums(folder: Path, world: World) -> dict[str, list[Any]]:
    """Size and checksum of this rank's share of the files, flushed to disk."""
    sums = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file())[world.rank :: world.size]:
        with path.open("rb+") as file:
            flush(file)
        sums[path.relative_to(folder).as_posix()] = [path.stat().st_size, _sum(path)]
    return sums


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _root_cause(error: BaseException) -> BaseException:
    """The exception inside PyTorch's wrappers."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def _reason(error: BaseException) -> str:
    cause = _root_cause(error)
    return f"{cause}" or type(cause).__name__

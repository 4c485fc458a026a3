"""Which files of dualres does one training step execute, and how deep is the stack from a block to its kernel?

    python benchmarks/files_of_a_step.py                  # nano × dar-block on the CPU, as `dualres train` runs it
    python benchmarks/files_of_a_step.py --residual mhc-4 --frames

Trains a few steps and profiles the last one with `sys.setprofile`. `--frames` also lists the frames.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import dualres
from dualres.config.loading import load_config
from dualres.data.prepare import Settings, prepare
from dualres.data.source import PYTHON
from dualres.model.block import ResidualBlock
from dualres.train.loop import train
from dualres.train.process_group import World
from dualres.util.progress import Progress

PACKAGE = Path(dualres.__file__).parent
KERNELS = str(PACKAGE / "ops" / "cpu")
STEPS = 4  # the last one is profiled


class Watch(Progress):
    """Profiles from the end of one step, when the loop shows its progress, to the end of the next."""

    def __init__(self) -> None:
        super().__init__(muted=True)
        self.files: dict[str, int] = {}  # calls
        self.kernels: dict[str, list[CodeType]] = {}  # the frames from a block's forward, by kernel
        self.steps = 0

    def show(self, text: str, fraction: float | None = None) -> None:
        self.steps += 1
        sys.setprofile(self.record if self.steps == STEPS - 1 else None)

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(str(PACKAGE)):
            return
        self.files[file] = self.files.get(file, 0) + 1
        caller = frame.f_back
        if file.startswith(KERNELS) and caller is not None and not caller.f_code.co_filename.startswith(KERNELS):
            frames, at = [frame.f_code], caller
            while at.f_back is not None and at.f_code is not ResidualBlock.forward.__code__:
                frames.append(at.f_code)
                at = at.f_back
            if at.f_back is not None:
                self.kernels.setdefault(frame.f_code.co_name, frames[::-1])


def main() -> None:
    """Train, then print the files and the depth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", default="nano")
    parser.add_argument("--residual", default="dar-block")
    parser.add_argument("--frames", action="store_true")
    arguments = parser.parse_args()
    small = {"layers": 4, "width": 32, "heads": 2, "kv_heads": 2, "context": 32, "vocab_size": 257}
    overrides = [f"model.{key}={value}" for key, value in small.items()]
    overrides += ["train.micro_batch=2", "train.global_batch=4", f"train.tokens={STEPS * 4 * 32}"]
    overrides += ["train.peak_flops=1e9", "train.warmup_steps=1", "train.validation_tokens=32"]
    config = load_config(arguments.scale, arguments.residual, overrides)
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        prepare(Settings(PYTHON, "bytes"), Path(folder) / "data")
        alone = World(0, 1, torch.device("cpu"), None, None)
        train(config, Path(folder) / "data", Path(folder) / "run", alone, watch)
    for file, calls in sorted(watch.files.items()):
        print(f"{calls:7,} calls  {Path(file).relative_to(PACKAGE)}")
    print(f"{len(watch.files)} files of dualres in one step of {arguments.residual}")
    for name, frames in watch.kernels.items():
        ours = [code for code in frames if code.co_filename.startswith(str(PACKAGE))]
        print(f"{len(ours)} frames of dualres ({len(frames)} in total) from ResidualBlock.forward to {name}")
        if arguments.frames:
            print("\n".join(f"    {'/'.join(Path(code.co_filename).parts[-3:])}:{code.co_name}" for code in frames))


if __name__ == "__main__":
    main()

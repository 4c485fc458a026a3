"""Samples of text: what `dualres generate` prints for the last checkpoint of one run of each method."""

import functools
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dualres.hub.open_model import open_model
from dualres.report.comparison import count_parameters
from dualres.report.runs import Group, Run
from dualres.train.checkpoint import MANIFEST, complete_checkpoints
from dualres.train.run_folder import CHECKPOINTS
from dualres.util.progress import Show

PROMPT, TOKENS, TEMPERATURE, SEED = "The", 100, 0.8, 0
COMMAND = shlex.join(["dualres", "generate", "RUN", PROMPT, "--tokens", str(TOKENS)])
COMMAND += f" --temperature {TEMPERATURE} --seed {SEED}"
MAX_SECONDS = 20.0  # of a model's forward passes
MAX_PARAMETERS = 5e8  # a larger model is slow to read, and may not fit in this machine's memory


class Sample(NamedTuple):
    group: Group
    run: Run
    checkpoint: str  # its name, which has the step
    text: str
    problem: str  # why there is no text


def samples(groups: Sequence[Group], show: Show) -> list[Sample]:
    """A sample of every method with weights, of a finished run if there is one."""
    found = []
    for group in groups:
        for run in (*group.finished, *group.unfinished):
            if checkpoints := complete_checkpoints(run.folder / CHECKPOINTS):
                show(f"sampling {run.folder.name}")
                found.append(Sample(group, run, checkpoints[-1].name, *_sample(run, checkpoints[-1])))
                break
    return found


def _sample(run: Run, checkpoint: Path) -> tuple[str, str]:
    """-> text, problem"""
    if count_parameters(run.config).total > MAX_PARAMETERS:
        return "", f"no sample of models with more than {MAX_PARAMETERS:,.0f} parameters"
    try:
        return _generate(run.folder, (checkpoint / MANIFEST).stat().st_mtime_ns)
    except OSError as error:  # while a run trains, it replaces its checkpoints
        return "", str(error)


@functools.cache
def _generate(folder: Path, changed: int) -> tuple[str, str]:
    """Remembered for a page that is made again, until the checkpoint has changed. -> text, problem"""
    try:
        model = open_model(folder)
        end = time.monotonic() + MAX_SECONDS

        def check_time(module: Any, inputs: Any) -> None:
            if time.monotonic() > end:
                raise TimeoutError(f"it took longer than {MAX_SECONDS:g} seconds")

        model.decoder.register_forward_pre_hook(check_time)
        return model.sample(PROMPT, TOKENS, TEMPERATURE, SEED), ""
    except (ValueError, RuntimeError, OSError) as error:  # damaged, not of this version, diverged, too slow
        return "", str(error)

"""The runs of a suite: every scale, method, learning rate and seed, with equal data order and budget."""

import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dualres.config.loading import load_config, short_name
from dualres.config.schema import Config, ConfigError
from dualres.data.shards import read_index
from dualres.model.decoder import build_decoder
from dualres.report.runs import Group, Run, read_run
from dualres.train.engines.build import engine_name
from dualres.train.loop import check_batch, check_vocabulary
from dualres.train.run_folder import SUMMARY, check_config, check_data, has_started
from dualres.util.errors import INTERRUPTED
from dualres.util.progress import Progress


class SuiteRun(NamedTuple):
    """One run of a suite, finished or not."""

    scale: str  # name or path
    residual: str  # name or path
    seed: int
    learning_rate: float | None  # None: the scale's

    @property
    def method(self) -> str:
        return short_name(self.residual)

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        rate = "" if self.learning_rate is None else f"-lr{self.learning_rate:g}"
        return f"{short_name(self.scale)}-{self.method}{rate}-seed{self.seed}"

    def overrides(self) -> list[str]:
        """Overrides for seed and learning rate; the schedule still ends at a tenth of the peak."""
        rate = self.learning_rate
        rates = [] if rate is None else [f"train.learning_rate={rate!r}", f"train.min_learning_rate={rate / 10!r}"]
        return [f"train.seed={self.seed}", *rates]


@dataclass(frozen=True)
class Suite:
    """The runs, and the options that they share."""

    runs: tuple[SuiteRun, ...]
    data: Path
    out: Path
    overrides: tuple[str, ...] = ()
    processes: int = 1
    device: str | None = None
    plugins: tuple[str, ...] = ()  # modules that register methods
    force: bool = False

    def config(self, run: SuiteRun) -> Config:
        return load_config(run.scale, run.residual, [*self.overrides, *run.overrides()])

    def is_finished(self, run: SuiteRun) -> bool:
        return (self.out / run.name / SUMMARY).exists()


def all_runs(
    pairs: Sequence[tuple[str, str]], seeds: Sequence[int], rates: Sequence[float | None] = (None,)
) -> tuple[SuiteRun, ...]:
    """Every (scale, residual) with every seed and rate; the first seed completes before the second starts."""
    return tuple(SuiteRun(scale, residual, seed, rate) for seed in seeds for rate in rates for scale, residual in pairs)


def check(suite: Suite) -> None:
    """Raise for runs that would share a folder, and for configs that differ from those of started runs."""
    names = [run.name for run in suite.runs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two runs of the suite are called {name}: use each file once, with distinct names")
    for run in suite.runs:
        config = suite.config(run)
        if has_started(suite.out / run.name):
            check_config(suite.out / run.name, config)


def check_start(suite: Suite) -> None:
    """Raise up front for anything that would stop a later run, and for data that differs from that of started runs."""
    remaining = [run for run in suite.runs if not suite.is_finished(run)]
    if not remaining:
        return
    index = read_index(suite.data)
    for run in suite.runs:
        if has_started(suite.out / run.name):
            check_data(suite.out / run.name, suite.data, index)
    for run in remaining:
        config = suite.config(run)
        check_batch(config, suite.processes)
        engine_name(config, suite.processes)
        check_vocabulary(config, suite.data, index)
        try:
            build_decoder(config.model, config.residual, device="meta")
        except ConfigError as error:
            raise ConfigError(f"{run.name}: {error}") from None


def run_all(suite: Suite, progress: Progress) -> list[SuiteRun]:
    """Run everything unfinished, one run after another, each in its own process. -> failed runs"""
    failed = []
    for number, run in enumerate(suite.runs, start=1):
        title = f"run {number}/{len(suite.runs)}  {run.name}"
        if suite.is_finished(run):
            progress.say(f"{title}: already finished")
            continue
        progress.say(title)
        code = _launch(suite, run, progress.verbosity)
        if code in (INTERRUPTED, -signal.SIGINT):
            raise KeyboardInterrupt
        if code != 0:
            failed.append(run)
            reason = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
            progress.warn(f"{run.name} {reason}; continuing with the others")
        elif not suite.is_finished(run):
            raise KeyboardInterrupt  # its ranks were interrupted, and saved a checkpoint
    return failed


def finished_runs(suite: Suite) -> dict[SuiteRun, Run]:
    return {run: read_run(suite.out / run.name) for run in suite.runs if suite.is_finished(run)}


def group_by_rate(finished: dict[SuiteRun, Run]) -> list[Group]:
    """A group of seeds per scale, method and learning rate, by the names of the command line."""
    alike: dict[tuple[str, str, str], list[Run]] = {}
    for run, result in finished.items():
        rate = "" if run.learning_rate is None else f"{run.learning_rate:g}"
        alike.setdefault((run.scale, run.method, rate), []).append(result)
    return [Group(scale, method, tuple(runs), {}, rate) for (scale, method, rate), runs in alike.items()]


def _launch(suite: Suite, run: SuiteRun, verbosity: int) -> int:
    """Run `dualres train` in its own process. -> exit code"""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={suite.processes}"]
    command = [sys.executable, *(torchrun if suite.processes > 1 else []), "-m", "dualres", "train"]
    command += [run.scale, run.residual, "--data", str(suite.data), "--out", str(suite.out / run.name)]
    command += ["--device", suite.device] if suite.device else []
    command += {-1: ["--quiet"], 1: ["--verbose"]}.get(verbosity, [])
    command += ["--force"] if suite.force else []
    for option, values in (("--set", (*suite.overrides, *run.overrides())), ("--plugin", suite.plugins)):
        command += [word for value in values for word in (option, value)]
    process: subprocess.Popen[bytes] | None = None
    stopped = False

    def stop(number: int, frame: types.FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.terminate()

    before = signal.signal(signal.SIGTERM, stop)
    try:
        process = subprocess.Popen(command)
        if stopped:
            process.terminate()
        code = process.wait()
    except KeyboardInterrupt:  # Ctrl-C reaches the run as well: let it save
        if process is not None:
            process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if stopped:
        raise KeyboardInterrupt
    return code

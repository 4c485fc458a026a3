"""The training loop, for every model, residual method and engine.

Step s (1, 2, …) takes sequences (s−1)·G … s·G−1 of the loader, with G the global batch. They are split into
micro-batches; of W data-parallel ranks, rank r takes micro-batches r, r+W, … So the data of a step does not depend on
method, engine or number of ranks. If W does not divide their number, zero-weight micro-batches are added.
"""

import logging
import math
import os
import signal
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dualres.analyze.health import health
from dualres.config.schema import Config, ConfigError
from dualres.data import shards
from dualres.data.loader import Loader, sum_over_windows
from dualres.data.shards import Index
from dualres.model.accounting import parameters
from dualres.model.decoder import meta_decoder
from dualres.ops import dispatch
from dualres.train import provenance, run_folder
from dualres.train.checkpoint import Checkpoints, load_initial_weights
from dualres.train.engines.base import Engine, Losses, MicroBatch
from dualres.train.engines.build import build_engine, engine_mesh, engine_name
from dualres.train.failure_detection import report_failed_ranks
from dualres.train.metrics import METRICS, SPEED, Log, Throughput, peak_memory
from dualres.train.optimizer import learning_rate
from dualres.train.process_group import World, set_timeout
from dualres.util.atomic_files import write_json
from dualres.util.errors import TrainError
from dualres.util.progress import Progress, short, silent

VERIFIED = "verified.json"  # the verified data files, which a resumed run can skip
LARGE = 10**8  # parameters or tokens that take seconds to initialize or verify


class TrainResult(NamedTuple):
    step: int
    finished: bool
    validation_loss: float | None


def train(
    config: Config,
    data: Path,
    folder: Path,
    world: World,
    progress: Progress,
    wandb: str | None = None,
    start: Path | None = None,
) -> TrainResult:
    """Train `config` on the prepared folder `data` into `folder`, or resume the run in it.

    `start`: an exported model that provides the initial weights of a new run.
    """
    check_batch(config, world.size)
    with ExitStack() as resources:
        world.on_main(lambda: resources.enter_context(run_folder.lock_run(folder)))
        index = world.gather_or_raise(lambda: shards.read_index(data))[world.rank]
        check_vocabulary(config, data, index)
        world.on_main(lambda: run_folder.open_run(folder, config, data, index, start))
        _verify(config, data, folder, index, world, progress)
        return Training(config, data, folder, index, world, progress).run(wandb, start)


class Training:
    """A run, in one of its processes."""

    def __init__(self, config: Config, data: Path, folder: Path, index: Index, world: World, progress: Progress):
        self.config, self.folder, self.world, self.progress = config, folder, world, progress
        train, context = config.train, config.model.context
        self.steps = config.steps
        self.loader = Loader(data, index, "train", context, train.seed)
        self.validation_loader = Loader(data, index, "validation", context, None)
        size = parameters(meta_decoder(config.model, config.residual)).total
        if size > LARGE:
            progress.say(f"building the model, {short(size)} parameters")
        self.engine: Engine = build_engine(config, world, index.end_of_text)
        self.checkpoints = Checkpoints(folder / run_folder.CHECKPOINTS, world, train.keep_checkpoints, progress.warn)
        if train.peak_flops is None:
            progress.show("measuring the peak FLOP/s of the device")
        self.throughput = Throughput(config, world.device, world.size)
        self.log: Log | None = None  # of the main rank
        self.step = self.best_step = 0
        self.best_loss: float | None = None
        self.validation_loss: float | None = None

    def run(self, wandb: str | None, start: Path | None) -> TrainResult:
        self._restore(start)
        if self.step < self.steps:
            self.world.on_main(lambda: provenance.record_start(self.folder, self.step, self.world))
        set_timeout(self.world, self.config.train.timeout)
        self.world.on_main(lambda: self._open_log(wandb))
        if any(self.world.gather_or_raise(self.world.terminated)):
            raise TrainError("terminated before the first step: run the same command to start again")
        first = self.step
        with stop_signals(self.world, self.progress, lambda: self.step > first) as stop_requested:
            try:
                # Before waiting for a save that may wait for a dead rank:
                with report_failed_ranks(self.world), say_compiling(self.progress):
                    stopped = False
                    if self.step < self.steps:
                        self._announce_first_step()
                    while self.step < self.steps and not stopped:
                        stopped = self._one_step(stop_requested)
                    return self._end()
            finally:
                self.checkpoints.wait()
                if self.log is not None:
                    self.log.close()
                self.progress.end()

    def _open_log(self, wandb: str | None) -> None:
        self.log = Log(self.folder, self.step, self.progress.warn, wandb)

    def _announce_first_step(self) -> None:
        if self.config.train.compile != "off":
            self.progress.say("compiling blocks: the first step takes minutes, or seconds if PyTorch has cached them")
        self.progress.show("running the first step")

    def _one_step(self, stop_requested: Callable[[], bool]) -> bool:
        """Take one training step. -> whether to stop"""
        train, step = self.config.train, self.step + 1
        rate = learning_rate(self.step, self.steps, train)
        self.throughput.start()
        own = self.engine.accumulate(self._micro_batches())
        # One all-reduce for the losses and for requests to stop, which may have reached only some ranks.
        language, router, stop = self.engine.sum_over_ranks([own.language, own.router, float(stop_requested())])
        losses = Losses(language / self.world.size, router / self.world.size)
        self._check_finite("loss", losses.language, step)
        norm = self.engine.update(rate, train.clip)
        self._check_finite("gradient norm", norm, step)
        self.throughput.stop()
        self.step = step
        self._record(losses, norm, rate)
        if self.config.analyze.every is not None and step % self.config.analyze.every == 0:
            self._log_health()
        improved = False
        if step % train.validate_every == 0 or step == self.steps:
            improved = self._validate()
        if step % train.checkpoint_every == 0 or step == self.steps or improved or stop > 0:
            self._save()
        return stop > 0

    def _micro_batches(self) -> list[MicroBatch]:
        """This rank's share of the next step."""
        train, ranks = self.config.train, self.engine.data_size
        first, count = self.step * train.global_batch, train.global_batch // train.micro_batch
        numbers = range(self.engine.data_rank, -(-count // ranks) * ranks, ranks)
        return [
            MicroBatch(self.loader.batch(first + number * train.micro_batch, train.micro_batch), ranks / count)
            if number < count
            else MicroBatch(self.loader.batch(first, train.micro_batch), 0.0)
            for number in numbers
        ]

    def _record(self, losses: Losses, norm: float, rate: float) -> None:
        if self.log is None:
            return
        step, throughput, sparse = self.step, self.throughput, self.config.model.moe is not None
        values: dict[str, Any] = {"tokens": step * throughput.tokens, "loss": losses.language}
        if sparse:
            values["router_loss"] = losses.router
        self.log.write(METRICS, step, **values, grad_norm=norm, learning_rate=rate)
        rate_now, mfu = throughput.tokens_per_second, throughput.utilization
        self.log.write(SPEED, step, seconds=throughput.seconds[-1], tokens_per_second=rate_now, mfu=mfu)
        router = f"  router {losses.router:.3f}" if sparse else ""
        text = f"step {step}/{self.steps}  loss {losses.language:.4f}{router}  {rate_now:,.0f} tokens/s  MFU {mfu:.1%}"
        self.progress.show(text, step / self.steps)

    def _log_health(self) -> None:
        """Stream statistics on the first validation sequences. All ranks run the same, since the model is sharded."""
        sequences = self.validation_loader.batch(0, self.config.train.micro_batch)
        losses: list[float] = []
        statistics = health(self.engine.decoder.stack, lambda: losses.append(self.engine.evaluate(sequences)))
        self._check_finite("loss on validation sequences", losses[0], self.step)
        if self.log is not None:
            self.log.write(METRICS, self.step, **statistics)

    def _validate(self) -> bool:
        """Update the validation loss. -> whether it is the best so far"""
        self.validation_loss = loss = self._mean_validation_loss()
        self._check_finite("validation loss", loss, self.step)
        improved = self.best_loss is None or loss < self.best_loss
        if improved:
            self.best_loss, self.best_step = loss, self.step
        if self.log is not None:
            self.log.write(METRICS, self.step, validation_loss=loss)
            self.progress.say(f"step {self.step}/{self.steps}  validation loss {loss:.4f}")
        return improved

    def _mean_validation_loss(self) -> float:
        """The mean loss of at most `validation_tokens` validation tokens, in whole windows."""
        loader, engine, train = self.validation_loader, self.engine, self.config.train
        count = loader.windows_within(train.validation_tokens)

        def batch_loss(sequences: Tensor) -> float:
            return engine.evaluate(sequences) * len(sequences)

        total = sum_over_windows(loader, count, train.micro_batch, batch_loss, engine.data_rank, engine.data_size)
        return engine.sum_over_ranks([total])[0] * engine.data_size / (self.world.size * count)

    def _save(self) -> None:
        state = {
            "step": self.step,
            "sequences": self.step * self.config.train.global_batch,
            "best_loss": self.best_loss,
            "best_step": self.best_step,
            "validation_loss": self.validation_loss,
            "random": torch.get_rng_state().numpy().tobytes().hex(),
        }
        if self.log is not None:
            self.log.sync()
        self.checkpoints.save(self.step, self.engine.tensors(), state)

    def _restore(self, start: Path | None) -> None:
        tensors = self.engine.tensors()
        if (last := self.checkpoints.last()) is not None:
            self.progress.show(f"loading {last}")
        state = self.checkpoints.restore(tensors)
        if state is None and start is not None:
            load_initial_weights(start, tensors, distributed=self.world.size > 1)
            self.progress.say(f"starting from the weights of {start}")
        if state is not None or start is not None:
            self.engine.load_tensors(tensors)
        if state is not None:
            self.step, self.validation_loss = state["step"], state["validation_loss"]
            self.best_step, self.best_loss = state["best_step"], state["best_loss"]
            torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["random"]), dtype=torch.uint8))
            self.progress.say(f"resumed from {self.checkpoints.last()}")

    def _end(self) -> TrainResult:
        self.checkpoints.wait()
        failures = self.world.gather_or_raise(lambda: self.checkpoints.failure)  # detects a rank that died while saving
        if any(failures):
            raise TrainError(next(filter(None, failures)))
        finished = self.step >= self.steps
        if self.world.is_main and self.throughput.seconds:
            provenance.record_end(self.folder)
        if finished and self.world.is_main:
            self._write_summary()
        elif not finished:
            self.progress.say(
                f"stopped at step {self.step} of {self.steps}; saved as {self.checkpoints.last()}. "
                "Run the same command to resume"
            )
        return TrainResult(self.step, finished, self.validation_loss)

    def _write_summary(self) -> None:
        path = self.folder / run_folder.SUMMARY
        if path.exists() and not self.throughput.seconds:  # a finished run, started again
            return
        summary = {
            "steps": self.step,
            "tokens": self.step * self.throughput.tokens,
            "validation_loss": self.validation_loss,
            "best_validation_loss": self.best_loss,
            "best_step": self.best_step,
            "tokens_per_second": self.throughput.overall(),
            "peak_memory": peak_memory(self.world.device),
            "processes": self.world.size,
            "engine": engine_name(self.config, self.world.size),
            "device": self.world.device.type,
            "threads": torch.get_num_threads(),
        }
        write_json(path, summary)

    def _check_finite(self, what: str, value: float, step: int) -> None:
        if math.isfinite(value):
            return
        batch, seed = self.config.train.global_batch, self.config.train.seed
        self.checkpoints.wait()  # the previous checkpoint may still be in flight
        last = self.checkpoints.last()
        saved = f"the last good checkpoint is {last}" if last else "there is no checkpoint yet"
        raise TrainError(
            f"the {what} is {value} at step {step} (sequences {(step - 1) * batch} to {step * batch - 1} with seed "
            f"{seed}); this step was not saved, {saved}. Lower train.learning_rate, or inspect these sequences"
        )


@contextmanager
def stop_signals(world: World, progress: Progress, has_progressed: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
    """SIGTERM and Ctrl-C request a stop after this step.

    In a single process, Ctrl-C stops immediately if no step is finished, and a second one ends the process. (torchrun
    sends a second one itself.)
    """
    received: list[int] = []

    def handle(number: int, frame: types.FrameType | None) -> None:
        if world.size == 1:
            if number == signal.SIGINT and not has_progressed():
                raise KeyboardInterrupt
            # By the system, without Python: it may be deep in a library. Files are complete or replaced on resuming.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        if not received and not progress.muted and progress.verbosity >= 0:
            now = f"; {'another ' if number == signal.SIGINT else ''}Ctrl-C stops now, without saving"
            with suppress(OSError):  # print is not reentrant
                os.write(2, f"\nstopping after this step{now if world.size == 1 else ''}\n".encode())
        received.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield lambda: bool(received) or world.terminated()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def say_compiling(progress: Progress) -> Iterator[None]:
    """Say once that kernels are compiled, if they are."""
    messages: list[str] = []

    def emit(record: logging.LogRecord) -> None:
        messages.append(record.getMessage())
        if len(messages) == 1:
            progress.say(messages[0])

    log, handler = logging.getLogger(dispatch.LOG), logging.Handler()
    handler.emit = emit  # type: ignore[method-assign]
    before, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
        log.propagate = propagate


def check_batch(config: Config, processes: int) -> None:
    train = config.train
    ranks = engine_mesh(config, processes).data
    if train.global_batch < train.micro_batch * ranks:
        raise ConfigError(
            f"train.global_batch={train.global_batch} must be at least train.micro_batch={train.micro_batch} × {ranks} "
            f"data-parallel ranks = {train.micro_batch * ranks}: increase it, or use a smaller micro_batch or fewer "
            "processes"
        )


def check_vocabulary(config: Config, data: Path, index: Index) -> None:
    if index.vocab_size > config.model.vocab_size:
        raise TrainError(
            f"{data / shards.INDEX}: the tokenizer has {index.vocab_size:,} tokens, more than "
            f"model.vocab_size={config.model.vocab_size}: set it to {index.vocab_size}, or use a smaller tokenizer"
        )


def _verify(config: Config, data: Path, folder: Path, index: Index, world: World, progress: Progress) -> None:
    """Verify all checksums, distributed over the ranks, unless an earlier launch did."""
    known = world.broadcast(shards.read_stamps(folder / VERIFIED))
    large = index.tokens("train") > LARGE
    if known is None and large:
        progress.say(f"verifying all of {data} once")
    share, vocab_size, show = (world.rank, world.size), config.model.vocab_size, progress.show if large else silent
    stamps = world.gather_or_raise(lambda: shards.verify(data, index, vocab_size, known or {}, share, show))
    if world.is_main:
        write_json(folder / VERIFIED, {file: stamp for part in stamps for file, stamp in part.items()})

"""How fast a run is: tokens per second without the first steps, and how much of the hardware the model's flops use."""

import resource
import statistics
import sys
import time

import torch

from dualres.config.schema import Config
from dualres.model.accounting import flops_per_token
from dualres.model.decoder import build_decoder

MEASURED_WIDTH, MEASURED_SECONDS = 1024, 0.3
RECENT = 20  # steps of which the live speed is the median


class Throughput:
    """Times steps. The first `untimed_steps` of a process compile and warm up: they do not count."""

    def __init__(self, config: Config, device: torch.device, processes: int):
        self.tokens = config.train.global_batch * config.model.context
        decoder = build_decoder(config.model, config.residual, device="meta")
        # A backward pass computes twice what a forward pass does. What is recomputed is no use of the hardware.
        self.flops = 3 * flops_per_token(decoder).total * self.tokens
        self.peak = processes * (config.train.peak_flops or measured_flops(device, config.train.precision))
        self.untimed = config.train.untimed_steps
        self.seconds: list[float] = []
        self.began = 0.0

    def start(self) -> None:
        """A step begins."""
        self.began = time.perf_counter()

    def stop(self) -> None:
        """It has ended; its losses have been read, so the device has finished."""
        self.seconds.append(time.perf_counter() - self.began)

    @property
    def step_seconds(self) -> float:
        """Of a recent step: the median, so that one hiccup does not show."""
        return statistics.median(self.seconds[-RECENT:])

    @property
    def tokens_per_second(self) -> float:
        """Recently."""
        return self.tokens / self.step_seconds

    @property
    def utilisation(self) -> float:
        """Model flops per second over the hardware's."""
        return self.flops / self.step_seconds / self.peak

    def overall(self) -> float | None:
        """Tokens per second of all timed steps; None where there were too few."""
        timed = self.seconds[self.untimed :]
        return len(timed) * self.tokens / sum(timed) if timed else None


def measured_flops(device: torch.device, precision: str) -> float:
    """Flops per second of a large matrix product on this device: what a model could reach at best."""
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
    """The most bytes that this process has held: on the GPU, or resident for a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size if sys.platform == "darwin" else size * 1024

"""`dualres plan`: what it prints, what it chooses, and what it refuses."""

import json
import shlex
from typing import Any

import pytest

from dualres.cli import main
from dualres.config.loading import load_config
from dualres.parallel.mesh import mesh_of
from dualres.plan.hardware import GIB, Hardware
from dualres.plan.search import choose

TENSOR = ["--set", "train.parallel.tensor=2", "--set", "train.parallel.sequence_parallel=true"]
CHECKED = [*TENSOR, "--set", "train.global_batch=64"]


def plan_of(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", *words, "--json"])
    out, shown = capsys.readouterr()
    assert shown == ("" if code == 0 else "dualres: this configuration does not fit in GPU memory\n")
    return code, json.loads(out)


def test_a_mesh_that_is_given(capsys: pytest.CaptureFixture[str]):
    given = ["nano", "mhc-2", "--gpus", "4", "--gpu-memory", "1", *CHECKED]
    code, made = plan_of(capsys, *given)
    assert code == 0
    assert not made["chosen"]
    assert made["mesh"]["name"] == "dp2·tp2"
    assert list(made["residuals"]) == ["standard", "attnres-block", "dar-block", "mhc-2"]
    for found in made["residuals"].values():
        (held,), (sent,) = found["memory"], found["communication"]
        assert held["total"] == sum(size for part, size in held.items() if part != "total")
        assert sent["tensor"] > 0
        assert sent["pipeline"] == 0
        assert found["tokens_per_second"] == pytest.approx(64 * 256 / found["seconds"]["total"])
    history = {name: found["memory"][0]["history"] for name, found in made["residuals"].items()}
    state = 16 * 128 * 96 * 4  # micro-batch × half a sequence × width, float32
    assert history == {"standard": 0, "attnres-block": 5 * state, "dar-block": 10 * state, "mhc-2": 0}
    assert made["launch"].startswith(
        "torchrun --nproc-per-node 4 -m dualres train nano mhc-2 --set train.parallel.tens"
    )
    assert main(["plan", *given]) == 0
    text, shown = capsys.readouterr()
    assert shown.startswith("dp2·tp2: standard")
    for words in ("not validated on GPUs", "989 TFLOP/s", "live streams", "start it with", "as given"):
        assert words in text


def test_a_mesh_that_is_chosen_fits_and_is_started(capsys: pytest.CaptureFixture[str]):
    code, made = plan_of(capsys, "nano", "dar-block", "--gpus", "16", "--gpu-memory", "1", "--node-size", "8")
    assert code == 0
    assert made["chosen"]
    assert made["mesh"]["processes"] == 16
    assert max(held["total"] for held in made["residuals"]["dar-block"]["memory"]) <= 0.9 * GIB
    assert made["launch"].startswith("torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint HOST:29500")
    overrides = [word for word in made["launch"].split() if "=" in word]
    config = load_config("nano", "dar-block", overrides)
    assert config.train.parallel.tensor == made["mesh"]["tensor"]


def test_less_memory_takes_what_is_slower():
    config = load_config("nano", "dar-block", ["train.global_batch=64"])
    wide = choose(config, 4, Hardware(memory=GIB))
    tight = choose(config, 4, Hardware(memory=0.5 * wide.peak_memory / 0.9))
    assert tight.peak_memory <= 0.5 * wide.peak_memory
    assert tight.step is not None
    assert wide.step is not None
    assert tight.step.seconds.total > wide.step.seconds.total
    asked = choose(config, 4, Hardware(memory=GIB), {"micro_batch", "recompute"})
    assert (asked.config.train.micro_batch, asked.config.train.recompute) == (16, "none")


@pytest.mark.parametrize(
    ("override", "chosen"),
    [
        ("train.parallel={tensor: 2, sequence_parallel: true}", False),
        pytest.param("train={parallel: {pipeline: 2}}", False, marks=pytest.mark.slow),
        ("train.parallel.zero_stage=3", True),
        pytest.param("train.parallel={zero_stage: 1}", True, marks=pytest.mark.slow),
    ],
)
def test_a_mesh_is_given_by_what_cuts(override: str, chosen: bool, capsys: pytest.CaptureFixture[str]):
    words = ["--set", override, "--set", "train.global_batch=64", "--set", "train.micro_batch=4"]
    code, made = plan_of(capsys, "nano", "standard", "--gpus", "4", "--gpu-memory", "1", *words)
    assert (code, made["chosen"]) == (0, chosen)
    started = load_config("nano", "standard", [w for w in shlex.split(made["launch"]) if "=" in w])
    assert mesh_of(started, 4)._asdict().items() <= made["mesh"].items()


@pytest.mark.parametrize(("ranks", "virtual"), [pytest.param(4, 1, marks=pytest.mark.slow), (2, 2), (4, 2)])
def test_what_a_pipeline_sends(ranks: int, virtual: int, capsys: pytest.CaptureFixture[str]):
    """Eight blocks in C = P·V even chunks; sixteen micro-batches, states there and gradients back."""
    cut = {"pipeline": ranks, "virtual_stages": virtual}
    given = ["nano", "dar-block", "--gpus", str(ranks), "--gpu-memory", "1", "--set", f"train.parallel={cut}"]
    given += [
        "--set",
        "residual.default_branches_per_block=2",
        "--set",
        "train.global_batch=64",
        "--set",
        "train.micro_batch=4",
    ]
    _, made = plan_of(capsys, *given)
    p, v, c = ranks, virtual, ranks * virtual
    stream, blocks = 4 * 256 * 96 * 4, 8 // c
    cached, naive = p * (p - 1) // 2 + (v - 1) * p * (p - 1), c * (c - 1) // 2
    wanted = {
        "standard": (c - 1, c - 1),
        "attnres-block": (cached * blocks + p - 1, naive * blocks + c - 1),
        "dar-block": (2 * cached * blocks + p - 1, 2 * naive * blocks + c - 1),
    }
    for name, found in made["residuals"].items():
        sizes = sum(sent["pipeline"] for sent in found["communication"]), sum(found["pipeline_resent"])
        assert sizes == tuple(2 * 16 * stream * streams for streams in wanted[name]), name
    assert main(["plan", *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    for title, which in (("whole pipeline ", 0), ("  naive ", 1)):
        (line,) = (line for line in lines if line.startswith(title))
        shown = [f"{2 * 16 * stream * pair[which] / 1e9:.2f}" for pair in wanted.values()]
        assert line.removeprefix(title).split()[:3] == shown


def test_what_does_not_fit(capsys: pytest.CaptureFixture[str]):
    code, made = plan_of(capsys, "nano", "standard", "--gpus", "4", "--gpu-memory", "0.01", *CHECKED)
    assert (code, made["fits"]) == (1, False)
    assert main(["plan", "nano", "standard", "--gpus", "2", "--gpu-memory", "0.001"]) == 2
    assert "does not fit 90% of 0.001 GiB on any mesh of 2 GPUs: the smallest" in capsys.readouterr().err


REFUSED = {
    "no batch": (["--gpus", "4096"], "train.global_batch=16 has fewer micro-batches than 4096 GPUs"),
    "small batch": (["--gpus", "64", *TENSOR], "must be at least train.micro_batch=16 × 32 data-parallel ranks = 512"),
    "heads": (["--gpus", "8", "--set", "train.parallel.tensor=4"], "does not divide model.kv_heads=2"),
    "processes": (["--gpus", "3", *TENSOR], "does not divide 3 processes: start 2 or 4"),
    "nodes": (["--gpus", "12"], "--gpus 12 is not a multiple of --node-size 8: use 8"),
    "memory": (["--gpus", "8", "--gpu-memory", "0"], "--gpu-memory 0.0 is not positive"),
    "no end of memory": (["--gpus", "8", "--gpu-memory", "inf"], "--gpu-memory inf is not positive and finite"),
    "flops": (["--gpus", "8", "--peak-flops", "inf"], "--peak-flops inf is not positive and finite"),
    "hardly a flop": (
        ["--gpus", "8", "--peak-flops", "1e-300"],
        "--peak-flops 1e-300 is not a plausible hardware value",
    ),
    "utilization": (["--gpus", "8", "--utilization", "1.5"], "--utilization 1.5 exceeds 1 (100% of peak)"),
    "gpus": (["--gpus", str(10**24)], "exceeds the supported maximum: use at most 1,000,000"),
    "ddp": (["--gpus", "8", "--set", "train.engine=ddp"], "× 8 data-parallel ranks = 128"),
    "context": (["--gpus", "8", "--set", "train.parallel.context=2"], "context parallelism is not implemented"),
    "bandwidth": (["--gpus", "8", "--node-bandwidth", "-1"], "--node-bandwidth -1.0 is not positive"),
}


@pytest.mark.parametrize(("words", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "nano", "dar-block", "--gpu-memory", "1", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "says"), [("single", "use ddp, fsdp2 or deepspeed"), ("deepspeed", "zero_stage=0 shards nothing")]
)
def test_an_engine_that_training_refuses_is_not_planned(engine: str, says: str, capsys: pytest.CaptureFixture[str]):
    words = ["--gpu-memory", "1", "--gpus", "8", "--set", f"train.engine={engine}"]
    assert main(["plan", "nano", "dar-block", *words]) == 1
    assert says in capsys.readouterr().err


def test_a_residual_that_the_mesh_does_not_suit(capsys: pytest.CaptureFixture[str]):
    """Eight layers are eight blocks of `standard` and four of the block forms."""
    words = ["--set", "train.parallel.pipeline=8", "--set", "train.global_batch=128"]
    code, made = plan_of(capsys, "nano", "standard", "--gpus", "8", "--gpu-memory", "1", *words)
    assert code == 0
    assert len(made["residuals"]["standard"]["memory"]) == 8
    assert "chunks exceed the 4 blocks" in made["residuals"]["dar-block"]["problem"]


def test_links():
    """A ring leaves a node over the cards of all its members there; an exchange does not."""
    machine = Hardware(node_size=8, node_bandwidth=400, network_bandwidth=50)
    assert machine.ring(8, 1) == machine.ring(4, 2) == 400
    assert machine.ring(16, 1) == 400
    assert machine.ring(16, 2) == 200
    assert machine.ring(16, 8) == 50
    assert machine.exchange_seconds(800, 8) == 2
    assert machine.exchange_seconds(1500, 16) == 1500 * 8 / 15 / 50
    assert machine.next_stage(8) == 400
    assert machine.next_stage(16) == 50  # neighbours may share a node, but not all do, and the slowest sets the pace

"""What the config says reaches the engine."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from dualres.model.loss import document_numbers
from dualres.parallel.mesh import Mesh
from dualres.train.engines.base import TorchEngine
from dualres.train.engines.build import build_engine, compile_mode
from dualres.train.metrics import Throughput
from tests.train.tiny import ALONE, tiny_config

END = 256


def engine(**changes: Any) -> TorchEngine:
    made = build_engine(tiny_config(**changes), ALONE, END)
    assert isinstance(made, TorchEngine)
    return made


def sequences() -> torch.Tensor:
    """A document ends in the middle of each."""
    tokens = torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(0))
    tokens[:, 15] = END
    return tokens


def test_documents_are_isolated_when_asked():
    tokens = sequences()
    attending, isolated = (engine(train__documents=how).evaluate(tokens) for how in ("attend", "isolate"))
    decoder = engine().decoder
    with torch.no_grad():
        hidden = decoder.hidden(tokens[:, :-1], documents=document_numbers(tokens[:, :-1], END))
        logits = decoder.vocabulary.logits(hidden)
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert isolated == pytest.approx(wanted, rel=1e-6)
    assert abs(attending - isolated) > 1e-4


def kept(objective: nn.Module) -> int:
    """Bytes that the backward pass keeps beside parameters."""
    own = {p.untyped_storage().data_ptr() for p in objective.parameters()}
    sizes: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = objective(sequences())
    del loss
    return sum(sizes.values())


def test_recomputation_keeps_less():
    """What `selective` keeps it keeps by itself, out of autograd's sight: test_memory.py counts it."""
    none, selective, full = (kept(engine(train__recompute=how).wrapped) for how in ("none", "selective", "full"))
    assert max(selective, full) < none


def test_the_first_steps_are_not_timed():
    speed = Throughput(tiny_config(train__untimed_steps=2), torch.device("cpu"), 1)
    speed.seconds = [100.0, 50.0, 1.0, 3.0]
    assert speed.overall() == 2 * 4 * 32 / 4
    speed.seconds = [100.0, 50.0]
    assert speed.overall() is None


def test_pipelines_compile_without_cuda_graphs():
    train = dataclasses.replace(tiny_config().train, compile="max-autotune")
    assert compile_mode(train, Mesh(data=4, tensor=2)) == "max-autotune"
    assert compile_mode(train, Mesh(data=2, pipeline=2)) == "max-autotune-no-cudagraphs"
    assert compile_mode(dataclasses.replace(train, compile="default"), Mesh(pipeline=2)) == "default"
    assert "max-autotune-no-cudagraphs" in torch._inductor.list_mode_options()

"""One of eight processes whose tensor groups do not divide the vocabulary: started by test_mesh_training.py.

For each case they train a step, save it in FOLDER/CASE and load it again; FOLDER/CASE.safetensors has what was saved.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from dualres.parallel.mesh import Mesh
from dualres.train.checkpoint import Checkpoints
from dualres.train.engines.build import build_engine
from dualres.train.process_group import World, join_world
from tests.parallel.cases import Case, config_of, share, stirred_parts
from tests.parallel.mesh_worker import together, whole

PROCESSES, LAYERS = 8, 2
ODD = ("vocab_size", 257)
WIDTH = (("width", 18), ("head_size", 4), ("kv_heads", 4), ("attention_bias", "all"))  # nor do they divide the model's
CASES = {  # PyTorch's rows of unequal ranges are wrong from four data-parallel ranks on
    "untied": (Mesh(data=4, tensor=2), Case("standard", "dense", 1, (ODD, ("tied_embeddings", False)))),
    "factorised": (Mesh(data=4, tensor=2), Case("dar-block", "dense", 1, (ODD, ("embedding_width", 8)))),
    "pipeline": (Mesh(data=2, tensor=2, pipeline=2), Case("standard", "moe", 1, (ODD,))),
    "width": (Mesh(data=2, tensor=4), Case("standard", "dense", 1, (ODD, *WIDTH))),
}


def run(name: str, folder: Path, world: World) -> None:
    mesh, case = CASES[name]
    config = config_of(case, mesh, LAYERS)
    engine = build_engine(config, world, end_of_text=0)
    engine.accumulate(share(config, engine, 0))
    engine.update(2e-3, config.train.clip)
    tensors = engine.tensors()
    trained = {key: whole(tensor) for key, tensor in tensors.items()}
    checkpoints = Checkpoints(folder / name, world, keep=1, say=print)
    checkpoints.save(1, tensors, {"best_step": 1})
    checkpoints.wait()
    assert checkpoints.failure is None, checkpoints.failure
    for tensor in tensors.values():
        (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7.0)
    checkpoints.restore(tensors)
    wrong = [key for key, tensor in tensors.items() if not torch.equal(whole(tensor), trained[key])]
    assert not wrong, wrong
    every, _ = together(trained)
    if world.is_main:
        save_file(every, folder / f"{name}.safetensors")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    stirred_parts(1)
    with join_world("cpu") as world:
        for name in CASES:
            run(name, folder, world)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

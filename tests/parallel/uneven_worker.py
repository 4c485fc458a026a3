"""One of eight processes whose tensor groups do not divide the vocabulary: started by torchrun from test_meshes.py.

They train a step, save it in FOLDER/checkpoints and load it again; FOLDER/trained.safetensors has what was saved.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from dualres.parallel.mesh import Mesh
from dualres.train.build import build_engine
from dualres.train.checkpoint import Checkpoints
from dualres.train.world import join_world
from tests.parallel.cases import Case, config_of, share, stirred_parts
from tests.parallel.mesh_worker import whole

MESH = Mesh(data=4, tensor=2)
CASE = Case("standard", "dense", 1, (("vocab_size", 257), ("tied_embeddings", False)))
LAYERS = 1


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    stirred_parts(CASE.seed)
    with join_world("cpu") as world:
        config = config_of(CASE, MESH, LAYERS)
        engine = build_engine(config, world, end_of_text=0)
        engine.accumulate(share(config, engine, 0))
        engine.update(2e-3, config.train.clip)
        tensors = engine.tensors()
        trained = {name: whole(tensor) for name, tensor in tensors.items()}
        checkpoints = Checkpoints(folder / "checkpoints", world, keep=1, say=print)
        checkpoints.save(1, tensors, {"best_step": 1})
        checkpoints.wait()
        assert checkpoints.failure is None, checkpoints.failure
        for tensor in tensors.values():
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).fill_(7.0)
        checkpoints.restore(tensors)
        wrong = [name for name, tensor in tensors.items() if not torch.equal(whole(tensor), trained[name])]
        assert not wrong, wrong
        if world.leads:
            save_file(trained, folder / "trained.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

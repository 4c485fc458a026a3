"""Small models on small meshes, of which a plan and a run are compared."""

from typing import Any, NamedTuple

from dualres.config.schema import Config
from dualres.parallel.mesh import Mesh
from tests.train.tiny import tiny_config


class Case(NamedTuple):
    """One training step."""

    mesh: Mesh
    residual: str
    feedforward: str
    precision: str = "fp32"
    recompute: str = "none"
    changes: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        words = [self.mesh.describe(), self.residual, self.feedforward, self.precision, self.recompute]
        return "-".join([*words, *(f"{key}={value}" for key, value in self.changes)])


SIZES: dict[str, Any] = {  # every dimension divides by every group, so that all ranks of a group hold as much
    "model__layers": 8,
    "model__width": 64,
    "model__heads": 4,
    "model__kv_heads": 4,
    "model__vocab_size": 512,
    "model__context": 64,
    "residual__default_branches_per_block": 4,
    "train__micro_batch": 2,
    "train__global_batch": 8,
    "train__tokens": 2**20,
    "train__loss_rows": 64,
}


def config_of(case: Case) -> Config:
    mesh = case.mesh
    wide = {"model__ffn_width": 192} if case.feedforward == "dense" else {"model__moe__experts": 8}
    parallel = {
        "train__engine": "fsdp2" if mesh.processes > 1 else "single",
        "train__parallel__tensor": mesh.tensor,
        "train__parallel__pipeline": mesh.pipeline,
        "train__parallel__virtual_stages": mesh.virtual,
        "train__parallel__expert": mesh.expert,
        "train__parallel__sequence_parallel": "true" if mesh.tensor > 1 else "false",
        "train__precision": case.precision,
        "train__recompute": case.recompute,
    }
    return tiny_config(case.residual, case.feedforward, **{**SIZES, **wide, **parallel, **dict(case.changes)})


UNTIED = (("model__tied_embeddings", "false"), ("model__embedding_width", 32))


def cases(mesh: Mesh) -> list[Case]:
    """All of one launch."""
    kind = "moe" if mesh.expert > 1 else "dense"
    return [
        Case(mesh, "standard", kind),
        Case(mesh, "attnres-block", kind, changes=UNTIED),
        Case(mesh, "dar-block", kind),
        Case(mesh, "dar-block", "moe", "bf16", "selective"),
        Case(mesh, "dar-block", "moe", "fp32", "full"),
        Case(mesh, "mhc-2", kind, "bf16"),
    ]


MESHES = {
    mesh.describe(): mesh
    for mesh in (
        Mesh(2),
        Mesh(1, tensor=2),
        Mesh(2, expert=2),
        Mesh(1, pipeline=2),
        Mesh(1, pipeline=2, virtual=2),
        Mesh(2, tensor=2, expert=2),
        Mesh(2, pipeline=2),
        Mesh(2, pipeline=2, virtual=2),
        Mesh(1, tensor=2, pipeline=2),
    )
}

"""One of several processes that train tiny models with an engine each: started by torchrun from test_engines.py."""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from dualres.train.loop import train
from dualres.train.process_group import join_world
from tests.train.tiny import Told, tiny_config

CASES = {  # engine, ZeRO stage, feed-forward
    "torch": [("ddp", 0, "dense"), ("ddp", 0, "moe"), ("fsdp2", 0, "dense"), ("fsdp2", 0, "moe")],
    "deepspeed": [
        ("deepspeed", 1, "dense"),
        ("deepspeed", 1, "moe"),
        ("deepspeed", 2, "dense"),
        ("deepspeed", 3, "dense"),
    ],
}
SHORT: dict[str, Any] = {  # three micro-batches of a step, which two ranks do not divide
    "train__tokens": 12 * 3 * 32,
    "train__micro_batch": 1,
    "train__global_batch": 3,
    "analyze__every": 6,
}


def name(engine: str, stage: int, feedforward: str) -> str:
    return f"{engine}{stage or ''}-{feedforward}"


def main(group: str, data: Path, folder: Path, start: Path) -> None:
    """All cases of a group in one launch. FOLDER/CASE holds the run, FOLDER/errors.json what went wrong.

    Dense models begin with the weights of START.
    """
    errors = {}
    with join_world("cpu") as world:
        for case in CASES[group]:
            engine, stage, feedforward = case
            config = tiny_config(
                feedforward=feedforward, train__engine=engine, train__parallel__zero_stage=stage, **SHORT
            )
            try:
                begin = start if feedforward == "dense" else None
                train(config, data, folder / name(*case), world, Told(), start=begin)
            except Exception:
                errors[name(*case)] = traceback.format_exc()
        if world.is_main:
            (folder / "errors.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))

"""The shell command that starts a run."""

import shlex
from collections.abc import Mapping, Sequence

NODE_SIZE = 8  # GPUs per machine


def launch_command(
    scale: str,
    residual: str,
    overrides: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    *,
    processes: int = 1,
    node_size: int = NODE_SIZE,
    separator: str = " ",
) -> str:
    """The `dualres train` command, with `torchrun` for several processes.

    `options` that are None are omitted; those with a list are repeated.
    """
    words = ["dualres", "train", scale, residual]
    for name, value in (options or {}).items():
        values = value if isinstance(value, list) else [value]
        words += [word for each in values if each is not None for word in (f"--{name}", str(each))]
    if processes > 1:
        nodes = processes // node_size if processes % node_size == 0 else 1
        cluster = ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", "HOST:29500"]
        words = ["torchrun", *(cluster if nodes > 1 else []), "--nproc-per-node", str(processes // nodes), "-m", *words]
    return separator.join([shlex.join(words), *(shlex.join(["--set", override]) for override in overrides)])

"""Compiles every kernel for a GPU that need not be here: python -m tests.ops.compile_worker sm_90 bfloat16 4096

Calls the operators on tensors without data, so kernels get the tiles and the arguments that a GPU would give them, and
stops each launch after the compilation. Prints a line of JSON per kernel. Runs without TRITON_INTERPRET.
"""
# mypy: disable-error-code="import-untyped"

import json
import os
import re
import subprocess
import sys
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests.ops.meter import Inputs, prepared

TOKENS = (2, 4096)  # B, T
NVIDIA = {
    "registers": r"Used (\d+) registers",
    "stack": r"(\d+) bytes stack frame",
    "spills": r"(\d+) bytes spill stores",
}
AMD = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "stack": r"\.private_segment_fixed_size:\s+(\d+)",
    "spills": r"\.vgpr_spill_count:\s+(\d+)",
}


class Driver:
    """As much of a GPU's driver as a compilation asks for."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def target_of(name: str) -> GPUTarget:
    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 32 if name.startswith("gfx1") else 64)


def resources(compiled: Any, target: GPUTarget) -> dict[str, int]:
    """Registers per thread, bytes of stack, what was spilled, and accesses to global memory of fewer than 4 bytes."""
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        patterns, narrow = AMD, r"(?:global|buffer)_(?:load|store)_(?:short|ushort|byte|ubyte)"
    else:
        text = assembler_report(compiled.asm["ptx"], target.arch)
        patterns, narrow = NVIDIA, r"(?:ld|st)\.global\S*\.[bus]?f?(?:8|16)\s"
    count = {name: int(re.search(pattern, text)[1]) for name, pattern in patterns.items()}  # type: ignore[index]
    return {**count, "narrow": len(re.findall(narrow, compiled.asm["amdgcn" if patterns is AMD else "ptx"]))}


def assembler_report(ptx: str, arch: int) -> str:
    """What ptxas says of spills: the binary itself tells only of its stack."""
    ptxas = triton.knobs.nvidia.ptxas_blackwell if arch >= 100 else triton.knobs.nvidia.ptxas
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [ptxas.path, "-v", f"--gpu-name=sm_{arch}{'a' if arch >= 90 else ''}", file.name, "-o", os.devnull]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def ops(streams: int) -> list[tuple[str, dict[str, Any]]]:
    """DAR, AttnRes and mHC with as many streams, as a chain of reads calls them; and a read that has no carrier."""
    later: dict[str, Any] = {"later": ("live", "retrieved", "carried")}
    return [
        ("prefix", {"states": 9, "sets": 2, "outputs": 2, **later}),
        ("read", {"updates": 0, "outputs": 2, **later}),
        ("read", {"updates": 2, "outputs": 2, "carried": 2, **later}),
        ("read", {"updates": 3, "outputs": 2}),
        ("read", {"updates": 5, "outputs": 2, "carried": 4, **later}),
        ("write", {"updates": 6, "streams": 2, "carried": 5}),
        ("prefix", {"states": 9, "sets": 1, "outputs": 1, **later}),
        ("read", {"updates": 0, "outputs": 1, **later}),
        ("read", {"updates": 3, "outputs": 1, "carried": 2, **later}),
        ("write", {"updates": 4, "streams": 1}),
        ("hyper_read", {"updates": streams + 1, "streams": streams, "carried": streams, **later}),
        ("write", {"updates": streams + 2, "streams": streams}),
    ]


def main(name: str, dtype: str, width: str, streams: str = "4") -> None:
    target = target_of(name)
    torch.version.hip = "0" if target.backend == "hip" else None
    triton.runtime.driver.set_active(Driver(target))
    run, seen = JITFunction.run, set()

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        compiled = run(kernel, *arguments, grid=grid, warmup=True, **constants)
        if compiled.hash not in seen:
            seen.add(compiled.hash)
            name = f"{kernel.fn.__module__.rpartition('.')[-1]}.{kernel.__name__}"
            row = {"op": op, **sizes, "kernel": name, "warps": constants["num_warps"]}
            print(json.dumps({**row, **resources(compiled, target)}), flush=True)

    JITFunction.run = compile_only
    with torch.device("meta"):
        for op, sizes in ops(int(streams)):
            inputs = Inputs((*TOKENS, int(width)), getattr(torch, dtype))
            prepared(op, inputs, **{name: size for name, size in sizes.items() if name != "later"})()
            prepared(f"{op}_backward", inputs, **sizes)()


if __name__ == "__main__":
    assert not os.environ.get("TRITON_INTERPRET"), "the interpreter compiles nothing"
    main(*sys.argv[1:])

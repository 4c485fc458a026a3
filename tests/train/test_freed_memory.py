"""Freed memory stays with a process that trains on a CPU."""

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")

AGAIN = """
import resource, sys, threading, torch
from dualres.train.process_group import join_world

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

with join_world("cpu"):
    for _ in range(30):  # the heap takes a few times to settle
        before = faults()
        several = [torch.ones(size, 2**20, dtype=torch.uint8) for size in (3, 48, 160)]
        del several
    print(faults() - before)
    sums = []
    apart = threading.Thread(target=lambda: sums.append(torch.ones(200, 2**20, dtype=torch.uint8).sum().item()))
    apart.start()
    apart.join()
    print(sums == [200 * 2**20])
"""


def run(**environment: str) -> tuple[int, bool]:
    """New pages of the last time, and whether a thread gets memory too."""
    free = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    found = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True, env=free | environment
    )
    pages, works = found.stdout.split()
    return int(pages), works == "True"


@pytest.mark.slow
def test_memory_that_was_freed_is_had_again_without_new_pages():
    pages, works = run()
    assert pages < 20
    assert works


@pytest.mark.slow
def test_the_settings_of_a_user_stay():
    pages, works = run(MALLOC_TOP_PAD_="0")
    assert pages > 50  # 211 MiB, also where a page has 2
    assert works

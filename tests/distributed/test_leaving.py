"""A program that ends without an error destroys the process group that tightfit has made."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit
import torch.distributed as dist

atexit.register(lambda: print("there:", dist.is_initialized()))  # runs last

from tightfit.distributed.processes import join

join("cpu")
assert dist.is_initialized()
"""


@pytest.mark.parametrize(
    ("end", "there"), [("", False), ("raise ValueError", True), ("dist.destroy_process_group()", False)]
)
def test_the_process_group_ends_with_the_program(end: str, there: bool) -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM + end], capture_output=True, text=True, check=False)
    assert ended.stdout.splitlines() == [f"there: {there}"]
    assert ended.returncode == (1 if there else 0)

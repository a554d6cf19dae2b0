"""Writes scripts that start a training on several hosts with Slurm, torchrun or SkyPilot."""

from __future__ import annotations

import shlex
from pathlib import Path

from tightfit.errors import InputError
from tightfit.job import Job

KINDS = ("slurm", "torchrun", "skypilot")

_SLURM = """#!/usr/bin/env bash
# sbatch {name}
#SBATCH --job-name={job}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={nproc}
#SBATCH --gpus-per-node={nproc}
#SBATCH --cpus-per-task=8
#SBATCH --signal=TERM@120  # a checkpoint is written before the time is up
set -euo pipefail
srun --kill-on-bad-exit=1 {command}
"""
_TORCHRUN = """#!/usr/bin/env bash
# on each of the {nodes} hosts: HEAD=<name of the first host> bash {name}
set -euo pipefail
torchrun --nnodes {nodes} --nproc-per-node {nproc} --rdzv-backend c10d --rdzv-endpoint "${{HEAD:-127.0.0.1}}:29500" \\
  -m {command}
"""
_SKYPILOT = """# sky launch {name}
name: {job}
num_nodes: {nodes}
resources:
  accelerators: {accelerator}:{nproc}
workdir: .
setup: pip install tightfit
run: |
  torchrun --nnodes $SKYPILOT_NUM_NODES --nproc-per-node {nproc} --rdzv-backend c10d \\
    --rdzv-endpoint "$(head -n1 <<< "$SKYPILOT_NODE_IPS"):29500" -m {command}
"""


def script(kind: str, path: Path, nodes: int, nproc: int, accelerator: str, changes: list[str]) -> tuple[str, str]:
    """Return (file name, text) of a script that trains the job file `path` on `nodes` hosts with
    `nproc` devices each.

    kind         slurm, torchrun or skypilot
    accelerator  type of GPU, for skypilot
    changes      KEY=VALUE texts, which the script passes on to `tightfit train --set`

    Raises InputError for an unknown kind. Also reads the job file and raises InputError if it is
    wrong, so that the user sees the error before the job waits in a queue.
    """
    if kind not in KINDS:
        raise InputError(
            f"launch --{kind}", "is not known", f"use one of: {', '.join('--' + known for known in KINDS)}"
        )
    Job.load(path, [change for change in changes if not change.startswith("plan")])
    words = ["tightfit", "train", str(path), *(word for change in changes for word in ("--set", change))]
    name = f"{path.stem}.{'yaml' if kind == 'skypilot' else 'sh'}"
    name = f"{path.stem}-sky.yaml" if kind == "skypilot" else name
    text = {"slurm": _SLURM, "torchrun": _TORCHRUN, "skypilot": _SKYPILOT}[kind].format(
        name=name, job=path.stem, nodes=nodes, nproc=nproc, accelerator=accelerator, command=shlex.join(words)
    )
    return name, text

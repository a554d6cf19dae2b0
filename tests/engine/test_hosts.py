"""Several hosts, as network namespaces of this one: each has an address of its own, and a virtual
link is their only connection."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

JOB = """
model: {architecture: llama, vocab_size: 160, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4}
data: {synthetic: tokens, sequence_length: 16, held_out: 0.1}
train: {batch: 8, steps: 4, evaluate_every: 4, evaluate_samples: 16}
"""


def able() -> bool:
    """Whether this process may make namespaces."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not able(), reason="network namespaces need `ip`, and to be root")


class Hosts:
    """Two hosts with a wire between them."""

    def __init__(self) -> None:
        self.names = [f"tightfit{os.getpid()}{end}" for end in "ab"]
        self.wires = [f"tf{os.getpid() % 10**6}{end}" for end in "ab"]
        self.addresses = ["10.213.7.1", "10.213.7.2"]

    def begin(self) -> None:
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.wires[0], "type", "veth", "peer", "name", self.wires[1])
        for name, wire, address in zip(self.names, self.wires, self.addresses, strict=True):
            _ip("link", "set", wire, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", wire)
            _ip("-n", name, "link", "set", wire, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def end(self) -> None:
        for name in self.names:  # with the wire
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def sent(self, host: int) -> int:
        """Bytes that a host has sent to the other."""
        said = _ip("-n", self.names[host], "-s", "-j", "link", "show", self.wires[host])
        return int(json.loads(said)[0]["stats64"]["tx"]["bytes"])

    def run(self, commands: list[tuple[int, list[str], dict[str, str]]], folder: Path) -> None:
        """Run (host, command, variables) at once. Raises AssertionError with what the first that failed said."""
        started = [
            subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command],
                cwd=folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": self.wires[host], **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host, command, variables in commands
        ]
        try:
            said = [process.communicate(timeout=200)[0] for process in started]
        finally:
            for process in started:
                process.kill()
        for process, text in zip(started, said, strict=True):
            assert process.returncode == 0, text[-3000:]


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    two = Hosts()
    try:
        two.begin()
        yield two
    finally:
        two.end()


def metrics(folder: Path) -> list[dict[str, Any]]:
    (found,) = folder.rglob("metrics.jsonl")
    return [json.loads(line) for line in found.read_text().splitlines()]


def arguments(folder: Path, name: str, **plan: Any) -> list[str]:
    (folder / "job.yaml").write_text(JOB)
    said = [f"--set=plan.{field}={value}" for field, value in {**plan, "precision": "fp32", "compile": "none"}.items()]
    return ["-m", "tightfit", "train", "job.yaml", "--out", str(folder / name), *said]


def losses(folder: Path, name: str) -> list[float]:
    return [line["loss"] for line in metrics(folder / name) if "loss" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("alone")
    subprocess.run([sys.executable, *arguments(folder, "alone")], cwd=folder, check=True, capture_output=True)
    found = losses(folder, "alone")
    assert len(found) == 4
    return found


@pytest.mark.slow
def test_torchrun_on_two_hosts_with_states_divided_within_each(
    hosts: Hosts, tmp_path: Path, alone: list[float]
) -> None:
    train = arguments(tmp_path, "several", dp_replicate=2, dp_shard=2, zero=3)
    before = hosts.sent(0)
    hosts.run(
        [
            (
                number,
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number),
                 "--master-addr", hosts.addresses[0], "--master-port", "29641", *train],
                {},
            )
            for number in range(2)
        ],
        tmp_path,
    )  # fmt: skip
    assert losses(tmp_path, "several") == pytest.approx(alone, rel=1e-5)
    assert hosts.sent(0) - before > 4 * 4 * 18000  # a step's gradients, of as many fp32 parameters, cross the wire once


@pytest.mark.slow
def test_srun_on_two_hosts_with_a_pipeline_between_them(hosts: Hosts, tmp_path: Path, alone: list[float]) -> None:
    """The processes get only Slurm's variables. The pipeline is split between hosts, and tensor
    parallelism stays within each."""
    train = arguments(tmp_path, "several", pp=2, tp=2, micro_batch=2)
    slurm = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "77", "SLURM_NODELIST": hosts.addresses[0]}
    hosts.run(
        [
            (rank // 2, [sys.executable, *train], {**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2)})
            for rank in range(4)
        ],
        tmp_path,
    )
    assert losses(tmp_path, "several") == pytest.approx(alone, rel=1e-5)

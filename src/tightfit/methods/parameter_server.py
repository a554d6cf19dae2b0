"""Trains with a parameter server: one process, the server, holds the weights and optimizer states;
workers send gradients to it and receive weights from it. With async, workers of different speed do
not wait for each other.

Saves   optimizer states on the workers. async also saves time: no worker waits for the slowest one.
Costs   everything is sent over the server's link, the bottleneck: it receives the gradients of N
        workers, and sends the weights N times. In a ring all-reduce, each device sends about twice
        its gradients, for any N. async: other workers may have updated the weights since a gradient
        was computed (staleness); `staleness` is the largest number of steps that a worker may be
        ahead of the slowest worker.
When    workers of very different speed (async); otherwise data parallelism does the same with less
        waiting.
Order   replaces data parallelism; before the optimizer, which only the server uses.
Source  Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI;
        bounded staleness: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous
        Parallel Parameter Server", NeurIPS.

The server is process 0, and the workers are the processes after it. sync: the server sums the
gradients of all workers in the order of their ranks and updates once, as data parallelism does.
async: the server makes a separate update with each worker's mean gradient when it arrives.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.cost.ledger import Ledger
from tightfit.distributed.links import message
from tightfit.distributed.replicas import ReplicatedBuffers, broadcast_parameters
from tightfit.errors import InputError
from tightfit.machine import Machine
from tightfit.parallel.server.processes import (
    SERVER,
    AsyncServer,
    AsyncWorker,
    ParameterMessages,
    Server,
    ServerData,
    Worker,
)
from tightfit.plan import Plan
from tightfit.runtime.run import Run

MESSAGE_BYTES = 4  # of an element, whatever its type (8 in fp64): see `ParameterMessages`
FIELDS = ("parameter_server", "staleness")
VARIANTS = ({"parameter_server": "sync", "dp_replicate": 2},)


def enabled(plan: Plan) -> bool:
    return plan.parameter_server != "none"


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """Return the ledger (the predicted memory and time of a step) of a worker: without optimizer
    states, and with the communication over the server's link, which does not overlap with the
    computation. The memory of the server process is added as a separate peak, "server".
    """
    size, sent = (
        ledger.gradient_bytes(),
        float(sum(MESSAGE_BYTES * parameter.count for parameter in ledger.parameters if parameter.trainable)),
    )
    states = sum(update.state_bytes for update in ledger.updates.values())
    parameters = sum(parameter.bytes for parameter in ledger.parameters)
    updates = {name: replace(update, state_bytes=0) for name, update in ledger.updates.items()}
    # each worker sends its gradients and receives the weights, one worker after another
    workers = plan.dp_replicate
    through = replace(
        message("through the server", 2 * workers * sent, plan, machine, ("dp_replicate",), 2 * workers), overlaps=False
    )
    return replace(
        ledger,
        updates=updates,
        phases={**ledger.phases, "server": float(parameters + size + sent + states)},
        messages=(*ledger.messages, through),
    )


def apply(run: Run, plan: Plan) -> Run:
    """Return the run as that of the server or of a worker, according to the rank of this process.
    Raises InputError with parameter_server: async if the model has BatchNorm.
    """
    assert run.mesh is not None
    broadcast_parameters(run.model, run.mesh)
    rank, statistics = run.mesh.rank("dp_replicate"), ReplicatedBuffers(run.model, run.mesh)
    asynchronous = plan.parameter_server == "async"
    if asynchronous and statistics.buffers:
        raise InputError(
            "plan: parameter_server=async",
            "the model has BatchNorm, whose running statistics would differ between workers",
            "use parameter_server: sync, or a model without BatchNorm",
        )
    box = ParameterMessages([parameter for parameter in run.model.parameters() if parameter.requires_grad], run.mesh)
    if rank == SERVER:
        server = (AsyncServer if asynchronous else Server)(box, plan, statistics)
        return replace(run, executor=server, reduction=server, data=ServerData(run.data))
    worker = (AsyncWorker if asynchronous else Worker)(box, plan, statistics)
    return replace(run, executor=worker, reduction=worker)

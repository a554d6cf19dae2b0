"""Parameter server: one process has the weights and their states; workers send it gradients and get weights back.

Saves   workers the optimizer's states. sync: nothing else. async: nobody waits for the slowest worker.
Costs   everything goes through the server's link: N workers' gradients in and N times the weights out, where a ring sends
        each device twice the gradients whatever N is: the server is the bottleneck. async: a gradient is of weights that
        other workers' updates have come to since (staleness), at most `staleness` steps of the slowest.
When    workers of very different speed (async); else data parallelism does the same and waits less.
Order   with data parallelism, whose place it takes; before the optimizer, which the server alone has a use for.
Source  Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", OSDI; bounded staleness: Ho et al.
        2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server", NeurIPS.

The server is process 0, the workers those after it. sync: gradients are summed in the workers' order, then one update: what
data parallelism does. async: each worker's mean gradient is an update of its own when it arrives.
"""

from __future__ import annotations

from dataclasses import replace

from tightfit.errors import InputError
from tightfit.ledger import Ledger
from tightfit.machine import Machine
from tightfit.methods.mesh import Statistics, message, same_everywhere
from tightfit.methods.run import Run
from tightfit.methods.servers import SERVER, AsyncServer, AsyncWorker, GradientBox, Server, ServerData, Worker
from tightfit.plan import Plan

FIELDS = ("parameter_server", "staleness")
VARIANTS = ({"parameter_server": "sync", "dp_replicate": 2},)


def wanted(plan: Plan) -> bool:
    return plan.parameter_server != "none"


def cost(ledger: Ledger, plan: Plan, machine: Machine) -> Ledger:
    """A worker: it has no states. Beside it stands the server, which has them, and no activations; all wait for its link."""
    size, states = ledger.gradient_bytes(), sum(update.state_bytes for update in ledger.updates.values())
    parameters = sum(parameter.bytes for parameter in ledger.parameters)
    updates = {name: replace(update, state_bytes=0) for name, update in ledger.updates.items()}
    workers = plan.dp_replicate  # each sends its gradients and is sent the weights, one after another
    through = replace(
        message("through the server", 2 * workers * size, plan, machine, ("dp_replicate",), 2 * workers), hides=False
    )
    return replace(
        ledger,
        updates=updates,
        phases={**ledger.phases, "server": float(parameters + 2 * size + states)},
        messages=(*ledger.messages, through),
    )


def apply(run: Run, plan: Plan) -> Run:
    assert run.mesh is not None
    same_everywhere(run.model, run.mesh)
    rank, statistics = run.mesh.rank("dp_replicate"), Statistics(run.model, run.mesh)
    asynchronous = plan.parameter_server == "async"
    if asynchronous and statistics.buffers:
        raise InputError(
            "plan: parameter_server=async",
            "the model has BatchNorm, whose running statistics each worker would have of its own",
            "use parameter_server: sync, or a model with other norms",
        )
    box = GradientBox([parameter for parameter in run.model.parameters() if parameter.requires_grad], run.mesh)
    if rank == SERVER:
        server = (AsyncServer if asynchronous else Server)(box, plan, statistics)
        return replace(run, stages=server, reduction=server, data=ServerData(run.data))
    worker = (AsyncWorker if asynchronous else Worker)(box, plan, statistics)
    return replace(run, stages=worker, reduction=worker)

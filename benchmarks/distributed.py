"""Compare tightfit on several devices with the same parallelism written in PyTorch.

    .venv/bin/python benchmarks/distributed.py --out records/distributed.json
    .venv/bin/python benchmarks/distributed.py --out records/distributed.json --rounds 6 --only "data parallel"

The second command measures one pair again, in more rounds, and keeps the rest of the record.

It compares data parallelism, ZeRO, tensor parallelism and a pipeline. Processes use gloo, with one
thread each, on this machine, and start afresh in each round. The two of a pair exist at the same time
and take turns of a few steps. Ratios are medians over the turns of all rounds. DeepSpeed's ZeRO takes
part where it is installed (pip install deepspeed). The bytes that a device sends are computed from
the sizes of the collectives, as rings send them.

Two more tables follow: the bytes of model states that a device holds under each ZeRO stage at 1, 2, 4
and 8 devices, beside the formulas; and the share of a step that a pipeline's first device waits,
beside theory, for a model whose stages have equal work (its head is small).
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # in place of this file's folder
from benchmarks import harness

MODEL = {
    "architecture": "llama", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 8,
}  # fmt: skip
LENGTH, BATCH, WARM = 128, 16, 3
TURNS, TURN = 9, 2  # of a contender in a round, and steps of a turn
STEPS = TURNS * TURN
OURS: dict[str, dict[str, Any]] = {
    "data parallel": {"dp_replicate": 0},
    "zero 1": {"dp_shard": 0, "zero": 1},
    "zero 2": {"dp_shard": 0, "zero": 2},
    "zero 3": {"dp_shard": 0, "zero": 3},
    "tensor parallel": {"tp": 0},
    "pipeline": {"pp": 0, "schedule": "1f1b"},
}  # 0: as many as there are processes
PLAIN = {
    "data parallel": "DistributedDataParallel",
    "zero 1": "DistributedDataParallel with ZeroRedundancyOptimizer",
    "zero 2": "fully_shard, reshard_after_forward=False",
    "zero 3": "fully_shard",
    "tensor parallel": "parallelize_module",
    "pipeline": "Schedule1F1B",
}
DEEPSPEED = {"zero 1": 1, "zero 2": 2, "zero 3": 3}
MICRO = {"pipeline": 2}  # samples of a micro-batch, where the batch is cut
BUBBLE_TURNS = 6
BUBBLES = [(schedule, micro) for schedule in ("naive", "gpipe", "1f1b") for micro in (8, 4, 2)]
STATES = {0: lambda n: 16.0, 1: lambda n: 8 + 8 / n, 2: lambda n: 4 + 12 / n, 3: lambda n: 16 / n}


def job_of(vocabulary: int | None = None) -> Any:
    import tightfit

    data = {"synthetic": "tokens", "sequence_length": LENGTH}
    model = MODEL if vocabulary is None else {**MODEL, "vocab_size": vocabulary}
    return tightfit.Job(
        model=model, data=data, allow=[], train=tightfit.Train(batch=BATCH, steps=STEPS + WARM, weight_decay=0.0)
    )


class Counted:
    """Counts the bytes that this device sends, as a ring of n devices sends them.

    A gather or scatter sends (n-1)/n of the whole, a sum twice that. A reduction to one device and a
    broadcast are one row of such a whole.
    """

    def __init__(self) -> None:
        self.sent: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Counted:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        counted = self

        class See(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = str(func)
                if name.startswith(("c10d.", "_c10d_functional.")):
                    counted.add(name, [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)])
                return func(*args, **(kwargs or {}))

        self.mode = See()
        self.mode.__enter__()
        return self

    def add(self, name: str, tensors: list[Any]) -> None:
        import torch.distributed as dist

        ring = (dist.get_world_size() - 1) / dist.get_world_size()
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
        if "allreduce" in name or "all_reduce" in name:
            self.sent["sum"] += 2 * ring * sum(sizes)
        elif "allgather" in name or "all_gather" in name:
            whole = max(sizes) if name.startswith("c10d.") else sizes[0] * dist.get_world_size()
            self.sent["gather"] += ring * whole
        elif "reduce_scatter" in name:
            self.sent["scatter"] += ring * max(sizes)
        elif name.startswith("c10d.reduce_."):
            self.sent["scatter"] += ring * sum(sizes)
        elif name.startswith("c10d.broadcast_."):
            self.sent["gather"] += ring * sum(sizes)

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


def states_of(tensors: list[Any]) -> int:
    from tightfit.planner.tracing.storages import tensor_bytes

    return tensor_bytes(tensors)


@dataclass
class Contender:
    """step: takes the next step. end: returns its figures, after the last step."""

    step: Callable[[], None]
    end: Callable[[], dict[str, Any]]

    def turn(self) -> float:
        """Median seconds of some steps."""
        seconds = []
        for _ in range(TURN):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def ours(fields: dict[str, Any], micro_batch: int | None, vocabulary: int | None = None) -> Contender:
    import tightfit
    from tightfit.engine.step import CountSums, accumulate, take_step, update
    from tightfit.planner.tracing.live_storages import state_tensors, track_peak

    world = int(os.environ.get("WORLD_SIZE", "1"))
    fields = {name: value or world if name != "zero" else value for name, value in fields.items()}
    plan = tightfit.Plan(**fields, fused_optimizer=True, micro_batch=micro_batch)
    run = tightfit.build(job_of(vocabulary), plan)
    found: dict[str, Any] = {}
    losses: list[float] = []
    waited: list[float] = []
    steps = enumerate(run.data.steps(0, None))

    def step() -> None:
        number, batches = next(steps)
        begin = time.perf_counter()
        losses.append(take_step(run, batches, number).loss)
        if run.executor is not None:
            waited.append(run.executor.messages.waited_s / (time.perf_counter() - begin))  # type: ignore[attr-defined]
            run.executor.messages.waited_s = 0.0  # type: ignore[attr-defined]

    step()
    number, batches = next(steps)
    found["peak_bytes"] = track_peak(run, batches, lambda watched: take_step(watched, batches, number))[1].total
    with Counted() as counted:
        step()
    found["sent"] = dict(counted.sent)
    waited.clear()

    def end() -> dict[str, Any]:
        batches = next(steps)[1]
        if plan.zero == 1 and run.reduction is not None:  # before the last micro-batch, when gradients are still whole
            run.reduction.begin(False)
            run.loss_sum(batches[0]).backward()
        else:
            accumulate(run, batches, lambda: CountSums(run, [1]).wait()[0]).wait()
        weights = [w for group in run.optimizer.param_groups for w in group["params"]]
        own = [*run.model.parameters()]
        gradients = [t.grad for t in (*weights, *own) if t.grad is not None]
        found["state_bytes"] = states_of(own) + states_of(gradients) + states_of(state_tensors(run.optimizer))
        if plan.zero != 1:
            update(run)
        whole = sum(p.numel() for p in own)
        return {**found, "losses": losses, "parameters": whole, "waited": statistics.median(waited or [0.0])}

    return Contender(step, end)


def plain(kind: str) -> Contender:
    """The same job, on the same samples, as PyTorch's own tutorials write it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from transformers import LlamaConfig, LlamaForCausalLM

    from tightfit.planner.tracing.live_storages import StorageTracker

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architecture"}, use_cache=False)
    )
    parallel, parts = model, world
    if kind == "pipeline":
        return plain_pipeline(model, rank, world)
    if kind in ("data parallel", "zero 1"):
        parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif kind in ("zero 2", "zero 3"):
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (world,))
        for block in model.model.layers:
            fully_shard(block, mesh=mesh, reshard_after_forward=kind == "zero 3")
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh, parts, rank = init_device_mesh("cpu", (world,)), 1, 0
        table: Any = {}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            table[f"model.layers.*.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            table[f"model.layers.*.{name}"] = RowwiseParallel()
        parallelize_module(model, mesh, table)
    if kind == "zero 1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, weight_decay=0.0)
    else:
        kernels = {"foreach": False} if kind == "tensor parallel" else {"fused": True}
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0, **kernels)
    generator = torch.Generator().manual_seed(1)
    share = BATCH // parts

    def step() -> None:
        whole = torch.randint(0, MODEL["vocab_size"], (BATCH, LENGTH), generator=generator)
        tokens = whole[rank * share : (rank + 1) * share]
        labels = tokens.clone()  # as a loader hands both over
        logits = parallel(input_ids=tokens).logits[:, :-1]
        functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    tracker = StorageTracker(model.parameters())
    tracker.assign(model.buffers(), "parameters")
    return watched_contender(step, tracker, optimizer.optim if kind == "zero 1" else optimizer)


def watched_contender(step: Callable[[], None], tracker: Any, optimizer: Any) -> Contender:
    """A contender whose memory and messages are measured in its warm-up steps."""
    from tightfit.planner.tracing.live_storages import state_tensors

    step()
    tracker.assign(state_tensors(optimizer), "optimizer")
    with tracker:
        step()
    with Counted() as counted:
        step()
    found = {"peak_bytes": tracker.peak().total, "sent": dict(counted.sent)}
    return Contender(step, lambda: found)


def plain_pipeline(model: Any, rank: int, world: int) -> Contender:
    """Schedule1F1B over stages of the model that are split by hand."""
    import torch
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.nn import functional

    from tightfit.planner.tracing.live_storages import StorageTracker

    layers = list(model.model.layers)
    each = len(layers) // world
    first, last = rank * each, len(layers) if rank == world - 1 else (rank + 1) * each

    class Piece(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = model.model.embed_tokens if rank == 0 else None
            self.layers, self.rotary = nn.ModuleList(layers[first:last]), model.model.rotary_emb
            self.norm, self.head = (model.model.norm, model.lm_head) if rank == world - 1 else (None, None)

        def forward(self, x: Any) -> Any:
            hidden = x if self.embed is None else self.embed(x)
            rotary = self.rotary(hidden, torch.arange(hidden.shape[1])[None])
            for layer in self.layers:
                hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
            return hidden if self.head is None else self.head(self.norm(hidden))

    piece = Piece()
    optimizer = torch.optim.AdamW(piece.parameters(), weight_decay=0.0, fused=True)

    def loss_fn(logits: Any, tokens: Any) -> Any:
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())

    stage = PipelineStage(piece, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, BATCH // MICRO["pipeline"], loss_fn=loss_fn)
    generator = torch.Generator().manual_seed(1)

    def step() -> None:
        tokens = torch.randint(0, MODEL["vocab_size"], (BATCH, LENGTH), generator=generator)
        labels = tokens.clone()  # as a loader hands both over
        if rank == 0:
            schedule.step(tokens)
        elif rank == world - 1:
            schedule.step(target=labels)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    tracker = StorageTracker(piece.parameters())
    tracker.assign(piece.buffers(), "parameters")
    return watched_contender(step, tracker, optimizer)


def deepspeed(stage: int) -> Contender:
    """DeepSpeed's engine, as its own tutorial writes it, on a processor."""
    import torch

    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as library
    import torch.distributed as dist
    from torch.nn import functional
    from transformers import LlamaConfig, LlamaForCausalLM

    library.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(**{k: v for k, v in MODEL.items() if k != "architecture"}, use_cache=False)
    )
    share = BATCH // dist.get_world_size()
    engine, *_ = library.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), weight_decay=0.0, fused=True),
        config={
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": share,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )

    def step() -> None:
        tokens = torch.randint(0, MODEL["vocab_size"], (share, LENGTH))
        logits = engine(input_ids=tokens).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()

    for _ in range(WARM):
        step()
    return Contender(step, dict)


def contender(what: dict[str, Any]) -> Contender:
    if "plain" in what:
        return plain(what["plain"])
    if "deepspeed" in what:
        return deepspeed(what["deepspeed"])
    return ours(what["ours"], what.get("micro_batch"), what.get("vocabulary"))


def answer(what: list[dict[str, Any]], number: int, turns: int) -> list[dict[str, Any]]:
    """The figures of contenders that take turns; the order alternates from turn to turn."""
    those = [contender(one) for one in what]
    seconds: list[list[float]] = [[] for _ in those]
    for turn in range(turns):
        places = list(range(len(those)))
        for place in places if (turn + number) % 2 == 0 else reversed(places):
            seconds[place].append(those[place].turn())
    return [{**one.end(), "turns_s": turns} for one, turns in zip(those, seconds, strict=True)]


def answers(what: list[list[dict[str, Any]]], number: int, turns: int) -> list[list[dict[str, Any]]]:
    return [answer(group, number, turns) for group in what]


def alone(processes: int, what: dict[str, Any], turns: int) -> dict[str, Any]:
    """The figures of one contender, in processes that are started for it."""
    return children(processes, [[what]], turns=turns)[0][0]


def children(
    processes: int, what: list[list[dict[str, Any]]], number: int = 0, turns: int = TURNS
) -> list[list[dict[str, Any]]]:
    """The figures of each group of contenders, one group after another in the same new processes."""
    one_thread = {"OMP_NUM_THREADS": "1"}
    return harness.in_fresh_process(answers, what, number, turns, environment=one_thread, processes=processes)


def one_round(processes: int, number: int, kinds: list[str]) -> dict[str, dict[str, Any]]:
    """kind -> contender -> its figures. DeepSpeed changes torch, so it runs after all others."""
    pairs = [[{"ours": OURS[kind], "micro_batch": MICRO.get(kind)}, {"plain": kind}] for kind in kinds]
    found = {
        kind: dict(zip(("ours", "plain"), seen, strict=True))
        for kind, seen in zip(kinds, children(processes, pairs, number), strict=True)
    }
    if importlib.util.find_spec("deepspeed") is not None:
        beside = {kind: [{"ours": OURS[kind]}, {"deepspeed": DEEPSPEED[kind]}] for kind in kinds if kind in DEEPSPEED}
        for kind, group in beside.items():
            mine, theirs = children(processes, [group], number)[0]
            found[kind] |= {"deepspeed": theirs, "beside deepspeed": mine}
    return found


def ratios(rounds: list[dict[str, Any]], mine: str, theirs: str) -> list[float]:
    """The time of the other's steps as a multiple of ours, turn by turn."""
    both = [one for one in rounds if theirs in one]
    return [ratio for one in both for ratio in harness.ratios(one[theirs]["turns_s"], one[mine]["turns_s"])]


def compare(kind: str, processes: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    ours, plain = rounds[0]["ours"], rounds[0]["plain"]
    beside_plain = ratios(rounds, "ours", "plain")
    beside_deepspeed = ratios(rounds, "beside deepspeed", "deepspeed")
    return {
        "kind": kind,
        "processes": processes,
        "beside": PLAIN[kind],
        "speed_ratio": statistics.median(beside_plain),
        "speed_ratios": beside_plain,
        "deepspeed_speed_ratio": statistics.median(beside_deepspeed) if beside_deepspeed else None,
        "deepspeed_speed_ratios": beside_deepspeed,
        "peak_ratio": ours["peak_bytes"] / plain["peak_bytes"],
        "tokens_per_s": BATCH * LENGTH / statistics.median(s for one in rounds for s in one["ours"]["turns_s"]),
        "peak_bytes": ours["peak_bytes"],
        "sent_bytes": ours["sent"],
        "plain_sent_bytes": plain["sent"],
        "parameter_bytes": 4 * PARAMETERS(),
        "losses": ours["losses"][-1],
    }


def show(row: dict[str, Any]) -> None:
    sent = {name: size / row["parameter_bytes"] for name, size in row["sent_bytes"].items()}
    speeds = (
        f"{harness.spread(row['speed_ratios'])} x the speed, {row['peak_ratio']:.2f} x the peak of {row['beside']}; "
    )
    if row["deepspeed_speed_ratio"]:
        speeds += f"{row['deepspeed_speed_ratio']:.2f} x the speed of DeepSpeed; "
    shares = ", ".join(f"{name} {share:.2f}" for name, share in sent.items())
    print(f"{row['processes']} {row['kind']:16s} {speeds}sends, in parameters: {shares}", flush=True)


def PARAMETERS() -> int:
    hidden, inner, vocabulary = MODEL["hidden_size"], MODEL["intermediate_size"], MODEL["vocab_size"]
    block = 4 * hidden * hidden + 3 * hidden * inner + 2 * hidden  # type: ignore[operator]
    return 2 * vocabulary * hidden + MODEL["num_hidden_layers"] * block + hidden  # type: ignore[operator]


def main() -> None:
    parser = harness.make_parser(__doc__, rounds=1)
    parser.add_argument(
        "--only", choices=list(OURS), nargs="*", help="these pairs alone; what --out has of others stays"
    )
    parser.add_argument("--processes", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    known = harness.read_record(arguments.out) if arguments.only else {}
    rows, states, bubbles = (known.get(name, []) for name in ("compared", "states", "bubbles"))
    kinds = arguments.only or list(OURS)

    def write() -> None:
        """After each measurement, so that a run that is cut short leaves what it has."""
        harness.write_record(arguments.out, {"compared": rows, "states": states, "bubbles": bubbles})

    for processes in arguments.processes:
        rounds = harness.interleaved(
            arguments.rounds,
            [processes],
            lambda count, number: one_round(count, number, kinds),
            lambda count, _: f"on {count} processes",
        )
        for kind in kinds:
            row = compare(kind, processes, [one[processes][kind] for one in rounds])
            same = [place for place, one in enumerate(rows) if (one["kind"], one["processes"]) == (kind, processes)]
            if same:
                rows[same[0]] = row
            else:
                rows.append(row)
            show(row)
            write()
    if arguments.only:
        return
    for stage in (1, 2, 3):
        for processes in (1, 2, 4, 8):
            fields = {"dp_shard": 0, "zero": stage} if processes > 1 else {}
            seen = alone(processes, {"ours": fields, "micro_batch": 1}, turns=1)
            expected = STATES[stage](processes) * PARAMETERS()
            states.append({"stage": stage, "processes": processes, "bytes": seen["state_bytes"], "formula": expected})
            print(f"zero {stage} on {processes}: {seen['state_bytes'] / expected - 1:+.1%} of the formula", flush=True)
            write()
    for schedule, micro in BUBBLES:
        seen = alone(
            2, {"ours": {"pp": 0, "schedule": schedule}, "micro_batch": micro, "vocabulary": 64}, turns=BUBBLE_TURNS
        )
        count = BATCH // micro
        expected = 0.5 if schedule == "naive" else 1 / (count + 1)
        bubbles.append({"schedule": schedule, "micro_batches": count, "waited": seen["waited"], "theory": expected})
        print(
            f"{schedule} of {count} micro-batches on 2: waits {seen['waited']:.1%} of a step, theory {expected:.1%}",
            flush=True,
        )
        write()


if __name__ == "__main__":
    main()

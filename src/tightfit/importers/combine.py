"""Sets the fields that depend on several keys of another tool: batch, devices, precision, optimizer
and schedule. The functions read `Draft.parts`, the values that the keys gave, and write
`Draft.fields`, the fields of tightfit."""

from __future__ import annotations

import math

from tightfit.importers.conversions import OptimizerChoice, ScheduleChoice
from tightfit.importers.mapping import Draft
from tightfit.importers.selection import combine_selection


def combine(draft: Draft) -> None:
    """Set all fields of the draft (the unfinished job and plan) that depend on several keys. The
    order of the calls matters: for example, the schedule needs train.steps, and the batch needs the
    degrees of parallelism."""
    _degrees(draft)
    _batch(draft)
    _sharding(draft)
    _gradient_sync(draft)
    _precision(draft)
    _optimizer(draft)
    _length(draft)
    _schedule(draft)
    _interval(draft, "save", "train.checkpoint_every", without="never")
    _interval(draft, "eval", "train.evaluate_every", without=None)
    combine_selection(draft)
    _offload(draft)


def _degrees(draft: Draft) -> None:
    """Set plan.tp, plan.pp and plan.cp. If the file gives the number of devices of one node, also
    set draft.parts["devices"], the number of devices on all nodes together.

    Adds a contradiction if the file gives a different total number of devices.
    """
    for name in ("tp", "pp", "cp"):
        if name in draft.parts:
            draft.fields[f"plan.{name}"] = draft.parts[name]
    parts = draft.parts
    if "devices_per_node" in parts:
        found = parts["devices_per_node"] * parts.get("nodes", 1)
        draft.imply("devices", found, "devices_per_node")
        if parts["devices"] != found:
            draft.contradict(f"{draft.giver('devices')} is {parts['devices']}, but the file has {found} devices")


def model_parallel(draft: Draft) -> int:
    """Return the number of devices that work on the same samples: tp x pp x cp."""
    return math.prod(draft.parts.get(name, 1) for name in ("tp", "pp", "cp"))


def data_ranks(draft: Draft) -> int | None:
    """Return the number of ranks over which the samples of a step are divided: dp_shard x
    dp_replicate, or else devices / (tp x pp x cp). Returns None if the file does not give the
    number of devices, or (with a contradiction) if it is not a multiple of tp x pp x cp."""
    parts = draft.parts
    shard, replicate = parts.get("dp_shard"), parts.get("dp_replicate")
    if shard is not None and shard > 0:
        return int(shard * (replicate or 1))
    devices, together = parts.get("devices"), model_parallel(draft)
    if devices is None or together < 1:  # a degree below 1 is refused with the plan
        return None
    if devices % together:
        draft.contradict(
            f"{devices} devices are not a multiple of tp x pp x cp = {together} of them for each data rank"
        )
        return None
    return int(devices // together)


def _batch(draft: Draft) -> None:
    """Set plan.micro_batch and train.batch = micro-batch x accumulation steps x data ranks.

    Adds a contradiction, and leaves both fields out, if the file also gives train.batch and it is
    not this product. Adds to the user's to-do list if a factor is missing.
    """
    parts, ranks = draft.parts, data_ranks(draft)
    micro, accumulation, total = (parts.get(name) for name in ("micro_batch", "accumulation", "batch"))
    names = {name: draft.giver(name) for name in ("micro_batch", "accumulation", "batch")}
    if parts.get("split_batches") and micro is not None and ranks is not None:
        if micro % ranks:
            draft.contradict(
                f"{names['micro_batch']} {micro} is not a multiple of {ranks} data ranks, among which split_batches divides it"
            )
            _undecided_batch(draft)
            return
        micro //= ranks
        draft.remark("split_batches", f"{names['micro_batch']} is the batch of all {ranks} data ranks together")
    if micro is not None and "micro_batch" not in draft.defaulted:
        draft.fields["plan.micro_batch"] = micro
    if total is not None:
        if micro is not None and total % (micro * (accumulation or 1) * (ranks or 1)):
            factors = f"{names['micro_batch']} {micro}"
            factors += f" x {names['accumulation']} {accumulation}" if accumulation else ""
            draft.contradict(
                f"{names['batch']} {total} is not a multiple of {factors}" + (f" x {ranks} data ranks" if ranks else "")
            )
            _undecided_batch(draft)
            return
        if micro is not None and accumulation is not None:
            implied = total // (micro * accumulation)
            if ranks is not None and ranks != implied:
                draft.contradict(
                    f"{names['batch']} {total} is not {names['micro_batch']} {micro} x {names['accumulation']} "
                    f"{accumulation} x {ranks} data ranks = {micro * accumulation * ranks}"
                )
                _undecided_batch(draft)
                return
            if ranks is None and "devices" not in parts:
                parts["devices"] = implied * model_parallel(draft)
                if implied > 1:
                    draft.to_do.append(
                        f"the batch is that of {implied} data ranks ({total} / ({micro} x {accumulation})): "
                        f"train with --nproc {parts['devices']}, or on as many devices of several hosts"
                    )
        draft.fields["train.batch"] = total
    elif micro is not None and accumulation is not None:
        draft.fields["train.batch"] = micro * accumulation * (ranks or 1)
        for part in ("micro_batch", "accumulation"):
            draft.remark(
                part, f"train.batch is micro-batch {micro} x accumulation {accumulation} x data ranks {ranks or 1}"
            )
        if ranks is None:
            draft.to_do.append(
                f"train.batch is that of one device ({micro} x {accumulation}): the file does not say how many devices "
                "train together; import it again with --devices N if there are more"
            )
    else:
        if accumulation is not None:
            draft.settle("accumulation", "left open", "a factor of train.batch; the file does not have the micro-batch")
        if "train.batch" not in draft.fields:
            draft.to_do.append(_SET_BATCH)


_SET_BATCH = "set train.batch, all samples of one optimizer step on all devices: the file does not decide it"


def _undecided_batch(draft: Draft) -> None:
    draft.drop("train.batch")
    draft.drop("plan.micro_batch")
    draft.to_do.append(_SET_BATCH)


def _sharding(draft: Draft) -> None:
    """Set plan.zero (the ZeRO stage), plan.dp_shard (the ranks that share one copy of the model)
    and plan.dp_replicate (the number of such copies)."""
    parts, ranks = draft.parts, data_ranks(draft)
    stage, is_hybrid = parts.get("zero", (None, False))
    shard, replicate = parts.get("dp_shard"), parts.get("dp_replicate")
    if shard is None and replicate is not None and stage:
        shard = -1
    if shard is not None:  # -1 takes the ranks that dp_replicate leaves
        if shard < 1 and ranks is not None:
            if ranks % (replicate or 1):
                draft.contradict(f"{ranks} data ranks are not a multiple of the {replicate} replicas")
                return
            shard = ranks // (replicate or 1)
        if shard is not None and shard >= 1:
            draft.fields["plan.dp_shard"] = shard
        else:
            draft.to_do.append(
                "plan.dp_shard is left open: it takes all remaining ranks, whose number the file does not say"
            )
    if replicate is not None:
        draft.fields["plan.dp_replicate"] = replicate
    cp = parts.get("cp", 1)
    if draft.is_dropped("plan.zero"):
        return
    if stage is None and ranks is not None and shard is None and replicate is None and "unread_sharding" not in parts:
        stage = 0  # several devices, and nothing says that they shard the model
    if stage is None:
        return
    nodes = parts.get("nodes", 1)
    if not is_hybrid:
        draft.settle("nodes", "not needed", "the number of devices counts those of all nodes")
    if stage and (shard == 1 or ranks == 1) and cp == 1:
        draft.remark("zero", "nothing is sharded over one data rank")
        stage = 0
    draft.fields["plan.zero"] = stage
    if shard is not None or replicate is not None or ranks is None:
        return
    if not stage:
        draft.point("devices", "plan.dp_replicate")
        draft.point("devices_per_node", "plan.dp_replicate")
        draft.fields["plan.dp_replicate"] = ranks
    elif is_hybrid and nodes > 1 and ranks % nodes == 0:
        draft.fields.update({"plan.dp_replicate": nodes, "plan.dp_shard": ranks // nodes})
    elif is_hybrid:
        draft.to_do.append("set plan.dp_replicate (nodes) and plan.dp_shard (devices of a node) for hybrid sharding")
    else:
        draft.fields["plan.dp_shard"] = ranks


def _gradient_sync(draft: Draft) -> None:
    """Set plan.gradient_sync if the file says when gradients are reduced, and if the plan shards
    them. ZeRO stages 0 and 1 always reduce once per step."""
    when = draft.parts.get("gradient_sync")
    if when is None:
        return
    if draft.fields.get("plan.zero", 0) >= 2:
        draft.fields["plan.gradient_sync"] = when
    else:
        draft.settle("gradient_sync", "not needed", "without zero: 2 or 3, tightfit reduces once per step")


def _precision(draft: Draft) -> None:
    parts = draft.parts
    on = [name for name in ("bf16", "fp16") if parts.get(name)]
    weights = parts.get("weights")
    if "precision" in parts:
        draft.fields["plan.precision"] = parts["precision"]
    elif len(on) == 2:
        _undecided_precision(draft, "bf16", "fp16")
    elif on and weights in ("bf16", "fp16") and weights != on[0]:
        _undecided_precision(draft, "weights", on[0])
    elif on:
        masters = parts.get("masters")  # None for a tool whose mixed precision is autocast
        has_16_bit_weights = weights == on[0] or masters is not None
        draft.fields["plan.precision"] = f"{on[0]}-true" if has_16_bit_weights else f"{on[0]}-mixed"
        if masters is not None:
            draft.fields["plan.master_weights"] = masters
            draft.remark(on[0], f"plan.master_weights: {str(masters).lower()}")
    elif weights in ("bf16", "fp16"):
        draft.fields["plan.precision"] = f"{weights}-true"
    elif parts.get("tf32"):
        draft.fields["plan.precision"] = "tf32"
    elif weights or "bf16" in parts or "fp16" in parts:
        draft.fields["plan.precision"] = "fp32"
    if "masters" in parts and "plan.master_weights" not in draft.fields:
        draft.settle("masters", "not needed", "the weights are in fp32")
    for name in ("bf16", "fp16"):
        if on and parts.get(name) is False:
            draft.settle(name, "not needed", "it is off")
    if parts.get("tf32") and draft.fields.get("plan.precision") != "tf32":
        draft.settle("tf32", "not needed", "products in 16 bits do not use tf32; allow: [bf16] permits it, too")
    elif parts.get("tf32") is False:
        draft.settle("tf32", "not needed", "it is off")


def _undecided_precision(draft: Draft, one: str, other: str) -> None:
    draft.contradict(f"{draft.giver(one)} and {draft.giver(other)} are both on, but a run computes in one type")
    draft.drop("plan.precision")
    draft.to_do.append("set plan.precision: bf16-mixed or fp16-mixed, and allow: [bf16] or [fp16]")


def _optimizer(draft: Draft) -> None:
    parts = draft.parts
    choice = parts.get("optimizer")
    if isinstance(choice, OptimizerChoice):
        draft.fields["train.optimizer"] = choice.name
        if choice.states:
            draft.fields["plan.states"] = choice.states
            draft.remark("optimizer", f"plan.states: {choice.states}")
        if choice.is_fused is not None and "optimizer" not in draft.defaulted:
            draft.fields.setdefault("plan.fused_optimizer", choice.is_fused)
            draft.remark("optimizer", f"plan.fused_optimizer: {str(choice.is_fused).lower()}")
        if choice.note:
            draft.remark("optimizer", choice.note)
    if "beta1" in parts or "beta2" in parts:
        draft.fields["train.betas"] = [parts.get("beta1", 0.9), parts.get("beta2", 0.999)]


def _length(draft: Draft) -> None:
    """Set train.steps or train.epochs. If the file has both, the steps decide."""
    parts = draft.parts
    if parts.get("steps") is not None:
        draft.fields["train.steps"] = parts["steps"]
        if "epochs" in parts:
            draft.settle("epochs", "not needed", f"{draft.giver('steps')} ends the training")
    elif parts.get("epochs") is not None:
        draft.fields["train.epochs"] = parts["epochs"]


def _schedule(draft: Draft) -> None:
    """Set train.schedule, train.warmup, train.decay and train.final_learning_rate, as far as the
    file has keys for them. A fraction of the training is converted to a number of steps, or the
    other way round, if the number of all steps is known."""
    parts, fields = draft.parts, draft.fields
    choice, steps = parts.get("schedule"), fields.get("train.steps")
    if isinstance(choice, ScheduleChoice):
        fields["train.schedule"] = choice.name
        if choice.note:
            draft.remark("schedule", choice.note)
    warmup = parts.get("warmup", 0)
    for part in ("warmup", "warmup_ratio"):
        if isinstance(choice, ScheduleChoice) and not choice.warms_up and part in parts:
            draft.settle(part, "not needed", "this schedule of the tool has no warm-up")
            warmup = parts["warmup_ratio"] = 0
    share = parts.get("warmup_ratio", 0)
    if isinstance(warmup, float):
        share, warmup = warmup, 0
    if warmup and share:
        draft.settle("warmup_ratio", "not needed", f"{draft.giver('warmup')} comes before it")
    if not warmup and share:
        part = "warmup_ratio" if parts.get("warmup_ratio") else "warmup"
        if steps is None:
            draft.settle(part, "no counterpart", "train.warmup is a number of steps, and the file counts epochs")
            draft.to_do.append(
                f"set train.warmup to {share:g} of the training's steps (samples x epochs / train.batch)"
            )
            return
        warmup = math.ceil(share * steps)
    if "warmup" in parts or "warmup_ratio" in parts:
        if steps is not None and warmup > steps:
            draft.contradict(f"{warmup} steps of warm-up in a training of {steps}")
            draft.drop("train.warmup")
        else:
            fields["train.warmup"] = int(warmup)
    if "final_rate" in parts:  # in the unit of the learning rate
        rate = fields.get("train.learning_rate")
        if rate:
            fields["train.final_learning_rate"] = parts["final_rate"] / rate
        else:
            draft.settle("final_rate", "no counterpart", "a share of the learning rate, which the file does not have")
    if "decay_steps" in parts and fields.get("train.schedule") == "warmup-stable-decay":
        if steps:
            fields["train.decay"] = parts["decay_steps"] / steps
        else:
            draft.settle("decay_steps", "no counterpart", "train.decay is a share of the steps; the file counts epochs")
            draft.to_do.append(f"set train.decay to the share that {parts['decay_steps']} steps are of all")


def _interval(draft: Draft, name: str, field: str, without: str | None) -> None:
    """Set `field`, the number of steps between two checkpoints or two evaluations, from the tool's
    strategy ("no", "steps" or "epoch") and its number of steps. A number below 1 is a fraction of
    all steps.

    name     "save" or "eval", the first word of the names in `draft.parts`, such as save_steps
    without  the value of the field if the strategy is "no"; None leaves the field out
    """
    parts = draft.parts
    strategy, every = parts.get(f"{name}_strategy"), parts.get(f"{name}_steps")
    if strategy == "no":
        if without is not None:
            draft.fields[field] = without
        else:
            draft.settle(f"{name}_strategy", "not needed", "it is off, which is also tightfit's default")
        draft.settle(f"{name}_steps", "not needed", f"{draft.giver(f'{name}_strategy')} is no")
    elif strategy in ("epoch", "best"):
        draft.settle(f"{name}_strategy", "no counterpart", f"{field} counts steps, not epochs")
        draft.settle(f"{name}_steps", "not needed", f"{draft.giver(f'{name}_strategy')} is {strategy}")
    elif every is not None and every <= 0:
        draft.settle(f"{name}_steps", "not needed", "it is off")
    elif every is not None:
        if every < 1:
            steps = draft.fields.get("train.steps")
            if steps is None:
                draft.settle(f"{name}_steps", "no counterpart", f"{field} is a number of steps; the file counts epochs")
                return
            every = max(1, math.ceil(every * steps))
        draft.fields[field] = int(every)
    elif strategy == "steps":
        draft.settle(f"{name}_strategy", "not needed", f"without a number of steps; {field} has tightfit's default")


def _offload(draft: Draft) -> None:
    words = {
        word for name in ("offload_states", "offload_parameters", "offload_all") for word in draft.parts.get(name, ())
    }
    words |= set(draft.parts.get("offload_activations", ()))
    if not words:
        for name in ("offload_states", "offload_parameters", "offload_all", "offload_activations"):
            if name in draft.parts:
                draft.settle(name, "not needed", "it is off")
        return
    draft.fields["plan.offload"] = [w for w in ("states", "gradients", "parameters", "activations") if w in words]

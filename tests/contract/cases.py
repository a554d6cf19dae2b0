"""The tiny jobs on which every method is tested, and their training in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

import tightfit
from benchmarks.batch_norm_net import BatchNormNet
from tests import devices
from tests.pool import together
from tightfit.distributed.sharding import on_mesh_device
from tightfit.job import Permission
from tightfit.methods import compile as compile_method
from tightfit.methods.microbatch import correct_running_norms
from tightfit.models import model_factory

BATCH, STEPS, SAMPLES = 8, 3, 40
# all but those that train something else than plain PyTorch does
ALLOW = [word for word in get_args(Permission) if word not in ("another-optimizer", "nearest-rounding", "asynchronous")]
EPSILON = 1e-3
"""Adam's epsilon here. Some gradients are zero but for rounding (the bias of attention's keys); with 1e-8 Adam would
scale that rounding up to a full step, and no two orders of summation could agree."""

LLAMA = {
    "architecture": "llama",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT2 = {
    "architecture": "gpt2",
    "vocab_size": 160,
    "n_embd": 32,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
T5 = {
    "architecture": "t5",
    "vocab_size": 160,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BERT = {
    "architecture": "bert",
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
VIT = {
    "architecture": "vit",
    "image_size": 16,
    "patch_size": 8,
    "hidden_size": 32,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_labels": 10,
}


def language_samples(masked_lm: bool) -> list[dict[str, Tensor]]:
    """Samples whose labels count unevenly, so that dividing by micro-batches would show."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for index in range(SAMPLES):
        tokens = torch.randint(0, 160, (16,), generator=generator)
        labels = tokens.clone()
        labels[: index % 11] = -100
        if masked_lm:
            labels[1 + index % 3 :: 2] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def image_samples(keyed: bool) -> list[Any]:
    generator = torch.Generator().manual_seed(4)
    pairs = [
        (torch.randn(3, 16, 16, generator=generator), int(torch.randint(0, 10, (1,), generator=generator)))
        for _ in range(SAMPLES)
    ]
    return [{"pixel_values": x, "labels": y} for x, y in pairs] if keyed else pairs


@dataclass(frozen=True)
class Case:
    """A job, and how plain PyTorch computes its loss: (model, batch) -> (sum of losses, items that count)."""

    name: str
    job: tightfit.Job
    plain_loss: Callable[[nn.Module, Any], tuple[Tensor, int]]

    def replace(self, **train: Any) -> Case:
        return Case(self.name, self.job.replace(train=self.job.train.replace(**train)), self.plain_loss)


def causal(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int(
        (labels != -100).sum()
    )


def masked(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits = model(input_ids=batch["input_ids"]).logits.float()
    labels = batch["labels"]
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), int(
        (labels != -100).sum()
    )


def images(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits = model(pixel_values=batch["pixel_values"]).logits.float()
    return functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)


def pairs(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    logits = model(batch[0]).float()
    return functional.cross_entropy(logits, batch[1], reduction="sum"), len(logits)


def make_case(name: str, **train: Any) -> Case:
    model, data, plain_loss = {
        "llama": (LLAMA, language_samples(False), causal),
        "gpt2": (GPT2, language_samples(False), causal),
        "t5": (T5, language_samples(True), masked),
        "bert": (BERT, language_samples(True), masked),
        "vit": (VIT, image_samples(True), images),
        "batchnorm": (BatchNormNet, image_samples(False), pairs),
    }[name]
    settings = {
        "batch": BATCH,
        "steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "epsilon": EPSILON,
        "seed": 5,
        **train,
    }
    job = tightfit.Job(model=model, data=data, train=tightfit.Train(**settings), allow=ALLOW)
    return Case(name, job, plain_loss)


NAMES = ("llama", "bert", "vit", "batchnorm")


AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
FIRST_SCALE = 2.0**16  # of a dynamic loss scale


def plain_training(
    case: Case,
    micro_batch: int | None = None,
    precision: str = "fp32",
    replicas: int = 1,
    device: str = "cpu",
    change: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the job, trained by nothing but PyTorch, on the very samples in the very order.

    micro_batch  splits the batch the way one would by hand: only BatchNorm, which it changes, needs that.
    precision    -mixed is torch.autocast, in fp16 with torch's GradScaler; bf16-true a model and inputs cast to bf16
    replicas     how many equal parts each batch has whose BatchNorm statistics are taken apart, and averaged after
    device       the kind of device that computes. Losses and weights come back on the host
    change       what is done to the model before it is trained
    """
    settings = case.job.train
    run = tightfit.build(case.job, machine=devices.machine(device))  # for its initial weights and its samples, no more
    model, batches = run.model, run.data.steps(0, None)
    scaler = torch.amp.GradScaler(device, init_scale=FIRST_SCALE, enabled=precision == "fp16-mixed")
    if precision == "bf16-true":
        normalised = {id(p) for m in model.modules() if isinstance(m, nn.BatchNorm2d) for p in m.parameters()}
        for parameter in model.parameters():  # all but BatchNorm, whose weights stay in the type of its statistics
            if id(parameter) not in normalised:
                parameter.data = parameter.data.bfloat16()
    change(model)
    share = settings.batch // replicas
    size = min(micro_batch or share, share)
    correct_running_norms(model, -(-share // size))
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.epsilon)
    losses = []
    for _, (batch,) in zip(range(settings.steps or 0), batches, strict=False):
        running, before, seen = 0.0, statistics(norms), []
        for part in split(placed(batch, run.device), share):
            put(norms, before)
            for piece in split(part, size):
                if precision == "bf16-true":
                    piece = cast(piece)
                with torch.autocast(device, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST):
                    total, items = case.plain_loss(model, piece)
                count = items if size == settings.batch else settings.batch
                scaler.scale(total / count).backward()
                running += total.item() / count
            seen.append(statistics(norms))
        put(norms, [torch.stack(values).mean(0) for values in zip(*seen, strict=True)])
        losses.append(running)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return losses, state(model)


def statistics(norms: list[nn.BatchNorm2d]) -> list[Tensor]:
    buffers = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
    return [buffer.clone() for buffer in buffers if buffer is not None]


def put(norms: list[nn.BatchNorm2d], values: list[Tensor]) -> None:
    for norm, mean, variance in zip(norms, values[::2], values[1::2], strict=True):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)


def cast(batch: Any) -> Any:
    """The batch with its floating tensors in bf16."""
    return changed(batch, lambda x: x.bfloat16() if x.is_floating_point() else x)


def placed(batch: Any, device: torch.device) -> Any:
    """The batch, which comes on the host, on the device that computes."""
    return changed(batch, lambda x: x.to(device))


def changed(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    return (
        {name: change(x) for name, x in batch.items()} if isinstance(batch, dict) else tuple(change(x) for x in batch)
    )


def split(batch: Any, size: int) -> list[Any]:
    if isinstance(batch, dict):
        columns = {name: value.split(size) for name, value in batch.items()}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return list(zip(*(value.split(size) for value in batch), strict=True))


def state(model: nn.Module) -> dict[str, Tensor]:
    """Weights and running statistics, in fp32 on the host."""
    return {
        name: whole(value).detach().float().cpu().clone()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }


def training(
    case: Case, plan: tightfit.Plan, backend: str | None = None, device: str = "cpu"
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and weights of the job trained by tightfit with `plan`, on as many processes as it has devices.

    backend  of the compiler, in place of the one that generates code
    device   the kind of device that computes. Losses and weights come back on the host
    """
    if plan.devices == 1:
        return _training(case.name, case.job.train, plan, backend, device)
    devices.need(plan.devices, device)
    arguments = case.name, case.job.train, plan, backend, device
    results = together(plan.devices, "tests.contract.cases:_training", *arguments)
    for losses, weights in results[1:]:
        assert losses == results[0][0]
        assert distance(weights, results[0][1]) < 1e-6  # every process has the same model
    return results[0]


def _training(
    name: str, train: tightfit.Train, plan: tightfit.Plan, backend: str | None, device: str = "cpu"
) -> tuple[list[float], dict[str, Tensor]]:
    case, before = make_case(name), compile_method.BACKEND
    compile_method.BACKEND = backend or before
    try:
        run = tightfit.build(case.job.replace(train=train), plan, devices.machine(device))
        assert run.device.type == device
        losses = [step.loss for step in tightfit.train(run)]
        return losses, state_of(run)
    finally:
        compile_method.BACKEND = before


def state_of(run: Any) -> dict[str, Tensor]:
    """`state` of a model of which several devices may hold parts, on the host."""
    first = {id(parameter): name for name, parameter in run.model.named_parameters()}
    found = {}
    for name, value in run.model.state_dict(keep_vars=True).items():
        if value.is_floating_point():
            cut = run.tp_shards.get(first.get(id(value), ""))
            found[name] = (cut.unshard(whole(value).detach()) if cut else whole(value)).detach().float().cpu().clone()
    if run.executor is not None:  # each device of a pipeline has a stage
        right = {name: value for name, value in found.items() if name not in run.executor.stale_buffers}
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, right)
        order = model_factory(run.job.model)().state_dict()
        pieces = {name: value for one in everyones for name, value in one.items()}
        assert all(torch.allclose(one[n], pieces[n], rtol=1e-6, atol=1e-7) for one in everyones for n in one)
        found = {name: pieces[name] for name, value in order.items() if value.is_floating_point()}
    return found


def whole(tensor: Tensor) -> Tensor:
    return on_mesh_device(tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Norm of the difference of all tensors over the norm of all expected ones."""
    assert found.keys() == expected.keys()
    away = sum(float((found[name] - value).double().square().sum()) for name, value in expected.items())
    size = sum(float(value.double().square().sum()) for value in expected.values())
    return (away / size) ** 0.5

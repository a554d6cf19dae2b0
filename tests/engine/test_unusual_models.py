"""Models with unusual habits train as in plain PyTorch under each plan, or the plan is refused before
the first step: forwards that change their own weights, hooks on some blocks, scripted parts, weights
in channels_last, complex weights, and blocks run without gradients."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import tightfit
from tests.contract import cases
from tests.pool import together
from tightfit.engine import refused_models
from tightfit.errors import InputError, TightfitWarning
from tightfit.models.block_state import StateOfBlocks

WIDTH, HERE = 8, "tests.engine.test_unusual_models:"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Net(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Normalised(Block):
    """Its forward normalises its own weight, in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.inner.weight.copy_(functional.normalize(self.inner.weight))
        return super().forward(x)


class Replaced(Block):
    """The same, by another tensor."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data = functional.normalize(self.inner.weight.data)
        return super().forward(x)


class NormalisedNet(Net):
    block = Normalised


class ReplacedNet(Net):
    block = Replaced


class Teacher(Net):
    """Has a frozen copy of its head, whose weights follow those of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.head).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.head.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return made - 0.1 * self.teacher(x)


class Renormalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x.abs().long() % 16).mean(1))


class Counted(Renormalised):
    """An embedding whose gradients depend on the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, WIDTH, scale_grad_by_freq=True)


class Hooked(Net):
    """Only one block has a hook, on a part of it, and one weight scales its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner.register_forward_hook(lambda module, given, output: 1.5 * output)
        self.blocks[2].inner.weight.register_hook(lambda gradient: 0.5 * gradient)


class Frozen(Net):
    """Runs all blocks but the last without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[:3].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.blocks[:3]:
                x = block(x)
        return self.head(self.blocks[3](x))


class StraightThrough(Net):
    """Runs its last block without gradients, on a tensor that requires one."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        with torch.no_grad():
            step = self.blocks[3](x) - x
        return self.head(x + step)


class Checkpointed(Net):
    """Checkpoints its last block in torch's old way, which runs the forward without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        return self.head(checkpoint(self.blocks[3], x, use_reentrant=True))


class Rerun(Net):
    """Checkpoints its blocks in torch's new way, which runs their forward again in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Penalty(Net):
    """Adds a penalty on the weights of a block, which it reads outside of the block."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.blocks[1].inner.weight.square().mean()


class InPlace(Net):
    """Its blocks write to their input."""

    class Adding(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(torch.tanh(self.inner(x)))

    block = Adding


class Unregistered(Net):
    """Keeps frozen modules in a Python list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Block().requires_grad_(False) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.hidden:
            x = block(x)
        return super().forward(x)


class ScaledBetween(Net):
    """Scales the gradients between its blocks by hooks on tensors."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            if x.requires_grad:
                x.register_hook(lambda gradient: 0.9 * gradient)
        return self.head(x)


class Codebook(Net):
    """Updates a frozen parameter and a plain tensor, and draws from a generator of its own, outside of
    its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.steps = torch.zeros(1)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
            self.steps.add_(1)
        noise = torch.rand(WIDTH, generator=self.generator)
        return self.head(x - self.mean + 0.1 * noise * self.steps)


class Drawing(Net):
    """Draws from a generator of its own behind its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(4, generator=self.generator)


class Scripted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.first(x))


class Pixels(nn.Module):
    """Its convolutions have weights in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 8, 3), nn.Linear(8, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        products = x[:, :, None] * x[:, None, :]
        return self.head(
            self.two(torch.relu(self.one(torch.stack([products, x[:, :, None] - x[:, None, :]], 1)))).mean((2, 3))
        )


class Waves(Net):
    """Its blocks have complex weights beside real ones."""

    class Wave(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.gains, n=WIDTH))

    block = Wave


class ByList(Net):
    """Its head adds the weight of a block, which it has in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = [self.blocks[0].inner.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.tied[0])


class Listing(Net):
    """Has its weights in a list, too, which its forward does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.decayed = [weight for weight in self.parameters() if weight.dim() == 2]


class ByData(Net):
    """Two of its weights have the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].inner.weight.data = self.blocks[0].inner.weight.data


class ByBuffer(Net):
    """A buffer has the memory of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", self.head.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.table.sum()


class FirstBatch(Net):
    """Sets a parameter by its first batch, as ActNorm does (Kingma and Dhariwal 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("ready", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.mean.copy_(x.mean(0))
                self.ready.fill_(1)
        return super().forward(x - self.mean)


class Slope(Net):
    """Returns the gradient of its output with respect to its input, too."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_(True)
            made = super().forward(place)
            (slope,) = torch.autograd.grad(made.sum(), place, create_graph=True)
        return made + slope.sum(-1, keepdim=True)


class Quartered(Net):
    """Quarters a gradient once it is complete."""

    def __init__(self) -> None:
        super().__init__()

        def quarter(weight: Tensor) -> None:
            assert weight.grad is not None
            weight.grad.mul_(0.25)

        self.head.weight.register_post_accumulate_grad_hook(quarter)


class Masked(nn.Module):
    """An attention without blocks, whose forward has an optional argument beside `inputs`."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.into(inputs).chunk(3, -1)
        scores = query @ key.mT
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        return self.out((scores.softmax(-1) @ value).mean(1))


def job(model: str) -> tightfit.Job:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(WIDTH, generator=generator), torch.randn(4, generator=generator)) for _ in range(16)]
    train = tightfit.Train(optimizer="sgd", batch=4, steps=4, learning_rate=0.1, trackers=())
    return tightfit.Job(model=globals()[model], data=data, loss=nn.MSELoss(), train=train)


def trained(model: str, fields: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    run = tightfit.build(job(model), tightfit.Plan(**fields))
    return [step.loss for step in tightfit.train(run)], cases.state_of(run)


def refusal(model: str, fields: dict[str, Any]) -> str:
    try:
        trained(model, fields)
    except InputError as error:
        return str(error)
    return ""


def hold(model: str, fields: dict[str, Any]) -> None:
    losses, expected = trained(model, {})
    devices = tightfit.Plan(**fields).devices
    found = together(devices, HERE + "trained", model, fields) if devices > 1 else [trained(model, fields)]
    assert found[-1][0] == pytest.approx(losses, rel=1e-5)
    assert cases.distance(found[0][1], expected) <= 1e-5


SHARDED = {"zero": 3, "dp_shard": 2}
INTERLEAVED = {"pp": 2, "micro_batch": 2, "schedule": "interleaved", "virtual_stages": 2}
BUBBLE = {"pp": 2, "micro_batch": 2, "schedule": "zero-bubble"}
EQUAL: list[tuple[str, dict[str, Any]]] = [
    ("NormalisedNet", {"dp_replicate": 2}),
    ("NormalisedNet", {"zero": 2, "dp_shard": 2}),
    ("Teacher", {"zero": 1, "dp_shard": 2}),
    ("Hooked", {"compile": "block"}),
    ("Hooked", BUBBLE),
    ("Frozen", {"recompute": "full"}),
    ("Codebook", {"recompute": "sqrt"}),
    ("Scripted", {"recompute": "sqrt"}),
    ("Pixels", {"zero": 1, "dp_shard": 2}),
    ("Pixels", SHARDED),
    ("Pixels", {**SHARDED, "materialize": "device"}),
    ("Waves", {"zero": 2, "dp_shard": 2}),
    ("ByList", {"dp_replicate": 2}),
    ("ByList", {"zero": 1, "dp_shard": 2}),
    ("ByData", {"zero": 2, "dp_shard": 2}),
    ("Listing", SHARDED),
    ("ByData", {"recompute": "full"}),
    ("Slope", {"zero": 2, "dp_shard": 2}),
    ("Quartered", {"recompute": "full"}),
    ("StraightThrough", {"pp": 2, "micro_batch": 2}),
    ("Drawing", {"pp": 2, "micro_batch": 4}),
    ("Unregistered", SHARDED),
    ("Unregistered", {"materialize": "device"}),
    ("Teacher", {"materialize": "device", "pp": 2, "micro_batch": 4}),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("NormalisedNet", SHARDED, "zero=3: the model's forward changes its own parameter blocks.0.inner.weight"),
    ("NormalisedNet", {"parameter_server": "sync", "dp_replicate": 2}, "of which the plan keeps another copy"),
    ("ReplacedNet", {"zero": 1, "dp_shard": 2}, "use weight.copy_"),
    ("Unregistered", {**SHARDED, "materialize": "device"}, "modules that it does not register"),
    ("Unregistered", {"pp": 2, "micro_batch": 4, "materialize": "device"}, "modules that it does not register"),
    ("Penalty", SHARDED, "uses a layer's parameters without calling the layer"),
    ("InPlace", SHARDED, "a block writes to its input in place"),
    ("Teacher", SHARDED, "changes its own parameter teacher.weight"),
    ("Renormalised", {"dp_replicate": 2}, "its max_norm rescales the rows"),
    ("Counted", {"micro_batch": 2}, "divides gradients by how often a row occurs"),
    ("Counted", {"zero": 2, "dp_shard": 2}, "this plan splits the batch"),
    ("StraightThrough", INTERLEAVED, "the model calls block 3, with which a stage begins, under torch.no_grad"),
    ("Checkpointed", INTERLEAVED, "leave out the model's checkpoint"),
    ("Rerun", {"pp": 2, "micro_batch": 2}, "calls block 0 in a checkpoint of its own"),
    ("Codebook", INTERLEAVED, "outside of the blocks"),
    ("Drawing", INTERLEAVED, "draws from a generator of the model's own"),
    ("Frozen", {"recompute": "sqrt"}, "some blocks of a group under torch.no_grad"),
    ("ScaledBetween", {"recompute": "sqrt"}, "between its blocks, the model does more"),
    ("Scripted", SHARDED, "first is scripted"),
    ("Scripted", {"pp": 2, "micro_batch": 2}, "first is scripted"),
    ("Waves", SHARDED, "must have one dtype"),
    ("ByList", SHARDED, "reads blocks.0.inner.weight from tied, which is no parameter"),
    ("ByList", {"pp": 2, "micro_batch": 2}, "tie weights by assigning the parameter"),
    ("ByData", SHARDED, "blocks.0.inner.weight and blocks.1.inner.weight share their memory"),
    ("ByBuffer", SHARDED, "the buffer table has the memory of head.weight"),
    ("FirstBatch", {"dp_replicate": 2}, "sets the model's parameter mean by its batch"),
    ("Slope", SHARDED, "computes gradients itself"),
    ("Quartered", {"micro_batch": 2}, "would run after each micro-batch"),
]


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("model", "fields"), EQUAL, ids=str)
def test_unusual_models_train_as_in_plain_pytorch(model: str, fields: dict[str, Any]) -> None:
    hold(model, fields)


@pytest.mark.sweep(12)
@pytest.mark.parametrize(("model", "fields", "said"), REFUSED, ids=str)
def test_plans_that_would_change_unusual_models_are_refused(model: str, fields: dict[str, Any], said: str) -> None:
    devices = tightfit.Plan(**fields).devices
    found = together(devices, HERE + "refusal", model, fields) if devices > 1 else [refusal(model, fields)]
    assert all(said in one for one in found)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", ["encoder", "encoder and decoder", "teacher"])
def test_models_that_copy_modules_can_be_predicted(name: str) -> None:
    """nn.TransformerEncoder and models with a teacher deep-copy modules when they are made."""

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True)
            self.encoder: nn.Module = nn.TransformerEncoder(layer, 3)
            self.whole = nn.Transformer(WIDTH, 2, 2, 2, 16, batch_first=True)
            self.student = nn.Linear(WIDTH, 4)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            x = x[:, None]
            x = {"encoder": self.encoder, "encoder and decoder": lambda x: self.whole(x, x)}.get(name, nn.Identity())(x)
            return self.student(x[:, 0]) - self.teacher(x[:, 0])

    given = job("Net")
    asked = tightfit.Job(model=Text, data=given.data, loss=nn.MSELoss(), train=given.train)
    estimate = tightfit.estimate(asked, {})
    held = sum(one.numel() for one in Text().parameters()) * 4
    assert estimate.peak.rows["parameters"] == pytest.approx(held)


def test_recompute_of_attention_keeps_optional_inputs() -> None:
    generator = torch.Generator().manual_seed(0)
    data = [
        {
            "inputs": torch.randn(6, WIDTH, generator=generator),
            "mask": torch.arange(6) < 2 + number % 4,
            "y": torch.ones(4),
        }
        for number in range(16)
    ]
    train = tightfit.Train(batch=4, steps=3, learning_rate=0.1, trackers=())
    asked = tightfit.Job(
        model=Masked, data=data, loss=lambda made, batch: functional.mse_loss(made, batch["y"]), train=train
    )
    plain, recomputed = (
        [step.loss for step in tightfit.train(tightfit.build(asked, {"recompute": value}))]
        for value in ("none", "attention")
    )
    assert recomputed == pytest.approx(plain, rel=1e-6)


def test_weights_that_overlap_are_saved(tmp_path: Path) -> None:
    class Overlapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.randn(12, WIDTH)
            self.one, self.two = nn.Parameter(base[:WIDTH]), nn.Parameter(base[4:])

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.one + x @ self.two)[:, :4]

    run = tightfit.build(job("Net").replace(model=Overlapping))
    for _ in tightfit.train(run):
        pass
    tightfit.save(run, tmp_path / "saved", 4)
    assert list((tmp_path / "saved").rglob("*.safetensors"))


def test_a_function_that_returns_one_model_is_refused() -> None:
    net = Net()
    with pytest.raises(InputError, match="returns the same model each time"):
        tightfit.build(job("Net").replace(model=lambda: net))


def test_caches_of_keys_are_not_recomputed(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")

    class Caching(Block):
        def forward(self, x: Tensor, cache: Any = None) -> Tensor:
            cache.update(x[:, None, None], x[:, None, None], 0)
            return super().forward(x)

    class Cached(Net):
        block = Caching

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, cache=transformers.DynamicCache())
            return self.head(x)

    asked = job("Net").replace(model=Cached)
    with pytest.raises(InputError, match=r"blocks\.0 computes something else when it runs again"):
        tightfit.build(asked, {"recompute": "full"})
    monkeypatch.setattr(refused_models, "changed_after_forward", lambda *arguments: StateOfBlocks())
    run = tightfit.build(asked, {"recompute": "full"})
    with pytest.raises(InputError, match="gets a cache of keys and values"):
        next(iter(tightfit.train(run)))


class Averaging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        self.average.lerp_(made.detach().mean(0), 0.1)
        return made - self.average


def test_micro_batches_that_repeat_changes_are_warned_of() -> None:
    data = [(torch.randn(4), torch.randn(4)) for _ in range(8)]
    job = tightfit.Job(model=Averaging, data=data, loss=nn.MSELoss(), train=tightfit.Train(batch=4, steps=1))
    tightfit.build(job, tightfit.Plan())
    tightfit.build(job, tightfit.Plan(micro_batch=4))
    with pytest.warns(TightfitWarning, match="the forward changes average, and with plan.micro_batch=2"):
        tightfit.build(job, tightfit.Plan(micro_batch=2))


class Masking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.linear(x if mask is None else x * mask)


class NeedsMask(Masking):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask)


def triples(model: Any) -> tightfit.Job:
    data = [(torch.randn(4), torch.ones(4), torch.randn(2)) for _ in range(8)]
    train = tightfit.Train(batch=4, steps=1)
    return tightfit.Job(model=model, data=data, loss=lambda made, batch: (made - batch[2]).square().mean(), train=train)


def test_a_model_gets_one_item_of_a_sample() -> None:
    with pytest.warns(TightfitWarning, match="only the first, although its forward also takes mask"):
        tightfit.build(triples(Masking))
    with pytest.raises(InputError, match="only the first, and its forward also needs mask"):
        tightfit.build(triples(NeedsMask))
    tightfit.build(triples(lambda: nn.Linear(4, 2)))


@pytest.mark.parametrize(
    ("count", "said"), [(3.5, "returned 3.5"), (torch.tensor(0.25), "returned 0.25"), ("a", "returned a")]
)
def test_a_loss_counts_whole_items(count: Any, said: str) -> None:
    def total(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum()

    data = [(torch.randn(4), torch.randn(2)) for _ in range(8)]
    train = tightfit.Train(batch=4, steps=1)
    for given in (count, 4.0, torch.tensor(4), 4):
        objective = tightfit.Objective(total, lambda batch, given=given: given)
        job = tightfit.Job(model=lambda: nn.Linear(4, 2), data=data, loss=objective, train=train)
        run = tightfit.build(job)
        if given is count:
            with pytest.raises(InputError, match=said):
                next(tightfit.train(run))
        else:
            assert next(tightfit.train(run)).items == 4


def test_a_traced_module_trains() -> None:
    data = [(torch.randn(4), torch.randn(2)) for _ in range(8)]
    train = tightfit.Train(batch=4, steps=2)
    model = lambda: torch.jit.trace(nn.Linear(4, 2), torch.randn(2, 4))  # noqa: E731
    for fields in ({}, {"micro_batch": 2}):
        run = tightfit.build(tightfit.Job(model=model, data=data, loss=nn.MSELoss(), train=train), fields)
        assert all(step.loss > 0 for step in tightfit.train(run))

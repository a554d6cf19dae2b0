"""torch's own losses train as in plain PyTorch; for losses that cannot be trained, one sentence
says what to give."""

from __future__ import annotations

import re
import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.nn.modules.loss import _Loss

import tightfit


class Perceptron(nn.Module):
    def __init__(self, outputs: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.hidden, self.out = nn.Linear(5, 8), nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class Convolution(nn.Conv2d):
    def __init__(self) -> None:
        super().__init__(1, 5, 1)


class Conditioned(nn.Module):
    """Reads the label, as a model does that draws pictures of a class."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.classes = nn.Linear(5, 5), nn.Embedding(3, 5)

    def forward(self, inputs: Tensor, scale: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        given = self.layer(inputs) if labels is None else self.layer(inputs) + self.classes(labels)
        return given if scale is None else given * scale[:, None]


class UNet(nn.Module):
    """Prints itself in many lines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(40)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Focal(nn.CrossEntropyLoss):
    """Extends one of torch's losses, and returns a mean whatever `reduction` is."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.cross_entropy(output, target, reduction="none")
        return ((1 - torch.exp(-loss)) ** 2 * loss).mean()


class OwnLoss(_Loss):
    """Extends only the base class of torch's losses, and has the signature of a loss of the user's."""

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return functional.mse_loss(output, batch[1])


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(3))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return functional.mse_loss(output, batch[1] + self.centre)


DRAW = torch.Generator().manual_seed(0)
INPUTS = torch.randn(24, 5, generator=DRAW)
REAL, BITS = torch.randn(24, 3, generator=DRAW), torch.randint(0, 2, (24, 3), generator=DRAW)
CLASSES = torch.randint(0, 3, (24,), generator=DRAW)
CLASSES[[1, 4, 5, 6]] = -100
LOSSES: list[tuple[Any, Tensor]] = [
    (nn.BCEWithLogitsLoss(), BITS),
    (nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0])), BITS.float()),
    (nn.MSELoss, REAL),
    (functional.mse_loss, REAL),
    (functional.l1_loss, REAL),
    (nn.HuberLoss(delta=0.3), REAL),
    (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    (functional.cross_entropy, CLASSES),
    (nn.CrossEntropyLoss(), REAL.softmax(1)),
    (nn.MultiLabelSoftMarginLoss(), BITS.float()),
    (nn.MultiMarginLoss(), CLASSES.clamp(min=0)),
    (partial(functional.cross_entropy, label_smoothing=0.1), CLASSES),
    (nn.CrossEntropyLoss(), CLASSES.clamp(min=0).to(torch.int32)),
]


def plain(loss: Any, targets: Tensor, steps: int) -> tuple[list[float], nn.Module]:
    """Plain PyTorch on the same samples in tightfit's order."""
    job = job_of(loss, targets)
    run = tightfit.build(job, tightfit.Plan())
    model = Perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    made = loss() if isinstance(loss, type) else loss
    seen = []
    for (batch,) in run.data.steps(0, 8 * steps):
        output = model(batch[0])
        target = batch[1].float() if isinstance(made, nn.BCEWithLogitsLoss) else batch[1]
        target = target.long() if target.dtype == torch.int32 else target
        value = made(output, target)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        seen.append(value.item())
    return seen, model


def job_of(loss: Any, targets: Tensor | None = None, **fields: Any) -> tightfit.Job:
    data = list(zip(INPUTS, REAL if targets is None else targets, strict=True))
    train = {"optimizer": "sgd", "momentum": 0.0, "learning_rate": 0.5, "batch": 8, "steps": 3, "trackers": []}
    return tightfit.Job(**{"model": Perceptron, "data": data, "loss": loss, "train": train, "allow": [], **fields})


@pytest.mark.sweep(4)
@pytest.mark.parametrize(("loss", "targets"), LOSSES, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_torch_s_losses_train_like_plain_pytorch(loss: Any, targets: Tensor) -> None:
    expected, reference = plain(loss, targets, 3)
    for plan in (tightfit.Plan(), tightfit.Plan(micro_batch=3)):
        run = tightfit.build(job_of(loss, targets), plan)
        found = [step.loss for step in tightfit.train(run)]
        assert found == pytest.approx(expected, rel=1e-6)
        for one, other in zip(run.model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_torch_s_losses_accept_dicts_and_are_predicted() -> None:
    data = [{"x": x, "labels": y} for x, y in zip(INPUTS, BITS, strict=True)]
    job = job_of(nn.BCEWithLogitsLoss(), data=data)
    expected = [
        step.loss for step in tightfit.train(tightfit.build(job_of(nn.BCEWithLogitsLoss(), BITS), tightfit.Plan()))
    ]
    assert [step.loss for step in tightfit.train(tightfit.build(job, tightfit.Plan()))] == expected
    assert tightfit.estimate(job, tightfit.Plan(), tightfit.Machine.named("a100-80gb")).peak_bytes > 0


def without_labels() -> list[Any]:
    return [{"x": x} for x in INPUTS]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("a model", {"model": UNet()}, r"job: model=UNet\(\.\.\.\): is a UNet(.|\n)*model=lambda: UNet\(\.\.\.\)"),
    (
        "samples without labels",
        {"data": without_labels()},
        r"a dict with the keys x, without a target, which the loss or the metric needs(.|\n)*'labels' key",
    ),
    ("no loss and no labels", {"data": without_labels(), "loss": None}, r"the fields x and no labels"),
    (
        "fields that forward does not take",
        {"data": [{"image": x, "labels": y} for x, y in zip(INPUTS, REAL, strict=True)]},
        r"fields image, and the model's forward does not take these(.|\n)*as forward names",
    ),
    (
        "a loss of output and target",
        {"loss": lambda output, target: ((output - target) ** 2).mean()},
        r"called as loss\(output, batch\), and the data gives a list of 2 items as batch",
    ),
    ("a loss without a graph", {"loss": lambda output, batch: output.detach().mean()}, r"no graph(.|\n)*\.detach\(\)"),
    ("a loss that is no number", {"loss": lambda output, batch: output}, r"not a scalar tensor"),
    ("a number", {"loss": lambda output, batch: output.mean().item()}, "a value of type float, not a scalar tensor"),
    ("a sum", {"loss": nn.MSELoss(reduction="sum")}, r"use reduction='mean'"),
    (
        "weights of classes",
        {"loss": nn.CrossEntropyLoss(weight=torch.ones(3))},
        r"divides by the weights(.|\n)*Objective",
    ),
    ("three arguments", {"loss": nn.TripletMarginLoss()}, r"more than an output and a target(.|\n)*def loss"),
    ("a forward of its own", {"loss": Focal()}, r"a forward of its own(.|\n)*return Focal\(\)\(output, batch\[1\]\)"),
    ("a trained loss", {"loss": Trained()}, r"has trainable parameters(.|\n)*into the model"),
    (
        "three items",
        {"data": [(x, 0, y) for x, y in zip(INPUTS, CLASSES, strict=True)], "loss": None},
        r"a tuple of 3 items, and the default loss needs an input and a label",
    ),
    (
        "two targets",
        {"data": [{"x": x, "labels": y, "target": y} for x, y in zip(INPUTS, REAL, strict=True)]},
        r"the fields labels and target, so it is not known which",
    ),
    (
        "real numbers as classes",
        {"data": list(zip(INPUTS, REAL[:, 0], strict=True)), "loss": None},
        r"type float32, and a cross entropy needs class numbers(.|\n)*MSELoss",
    ),
    (
        "real numbers as classes of a loss",
        {"data": list(zip(INPUTS, REAL[:, 0], strict=True)), "loss": nn.CrossEntropyLoss()},
        r"loss=CrossEntropyLoss: labels have the type float32",
    ),
    (
        "as many classes as columns",
        {"model": Convolution, "data": [(torch.ones(1, 5, 5), torch.ones(5, 5).long())] * 24, "loss": None},
        r"shape \(8, 5, 5, 5\) for labels of shape \(8, 5, 5\)(.|\n)*classes in dim 1",
    ),
    ("double inputs", {"data": list(zip(INPUTS.double(), REAL, strict=True))}, r"types float64(.|\n)*as float32"),
    (
        "images in bytes",
        {"model": Convolution, "data": [(torch.ones(1, 5, 5).byte(), torch.ones(5, 5, 5))] * 24},
        r"types uint8(.|\n)*as float32",
    ),
    ("another shape", {"model": lambda: Perceptron(1)}, r"shape \(8, 1\), and the targets have shape \(8, 3\)"),
    (
        "an objective without a graph",
        {"loss": tightfit.Objective(lambda model, batch: torch.zeros(()), len)},
        r"no graph",
    ),
    (
        "a complex loss",
        {"loss": lambda output, batch: torch.fft.fft(output.flatten())[0]},
        r"is a complex number(.|\n)*its real part",
    ),
]


@pytest.mark.parametrize(("fields", "says"), [one[1:] for one in WRONG], ids=[one[0] for one in WRONG])
def test_losses_that_cannot_be_trained_are_refused_clearly(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(tightfit.InputError, match=says) as raised:
        for _ in tightfit.train(tightfit.build(job_of(**{"loss": nn.MSELoss(), **fields}), tightfit.Plan())):
            pass
    assert len(re.findall(r"\n", str(raised.value))) <= 2
    assert len(str(raised.value)) < 500


@pytest.mark.filterwarnings("ignore:could not check whether blocks")
@pytest.mark.parametrize("fields", [{"recompute": "full"}, {"offload": ["activations"], "offload_to": "disk"}], ids=str)
def test_gradients_of_torch_func_in_a_loss_are_refused(fields: dict[str, Any]) -> None:
    def total(model: nn.Module, batch: Any) -> Tensor:
        jacobian = torch.func.vmap(torch.func.jacrev(lambda one: model(one[None])[0]))(batch[0])
        return (model(batch[0]) - batch[1]).square().sum() + jacobian.square().sum()

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    data = [(torch.ones(4), torch.ones(4))] * 8
    loss = tightfit.Objective(total, lambda batch: len(batch[0]))
    job = tightfit.Job(model=Stack, data=data, loss=loss, train=tightfit.Train(batch=4, steps=1), allow=["offload"])
    with pytest.raises(tightfit.InputError, match=r"loss computes gradients with torch\.func"):
        list(tightfit.train(tightfit.build(job, tightfit.Plan(**fields))))


def losses_of(plan: dict[str, Any], **fields: Any) -> list[float]:
    return [step.loss for step in tightfit.train(tightfit.build(job_of(**fields), tightfit.Plan(**plan)))]


def test_a_loss_of_its_own_class_is_a_mean_over_samples() -> None:
    expected = losses_of({}, loss=nn.MSELoss())
    assert losses_of({"micro_batch": 2}, loss=OwnLoss()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("plan", [{}, {"compile": "model"}], ids=["eager", "compiled"])
def test_a_model_gets_the_labels_that_its_forward_takes(plan: dict[str, Any]) -> None:
    """And every other field that it takes beside `inputs`."""

    def loss(output: Tensor, batch: Any) -> Tensor:
        return functional.mse_loss(output, batch["noise"])

    classes = CLASSES.clamp(min=0)
    noise = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
    rows = zip(INPUTS, noise, classes, strict=True)
    data = [{"inputs": x, "scale": torch.tensor(2.0), "noise": one, "labels": label} for x, one, label in rows]
    run = tightfit.build(job_of(loss, model=Conditioned, data=data), tightfit.Plan(**plan))
    (batch,) = next(run.data.steps(0, 8))
    output = Conditioned()(batch["inputs"], batch["scale"], batch["labels"])
    assert next(iter(tightfit.train(run))).loss == pytest.approx(loss(output, batch).item(), rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_targets_are_not_rounded_to_16_bits(precision: str) -> None:
    """A bf16 number near 100.3 is 100.5."""
    targets = torch.full((24, 3), 100.3)
    found = losses_of({"precision": precision}, loss=nn.MSELoss(), targets=targets, allow=["bf16", "nearest-rounding"])
    assert found[0] == pytest.approx(losses_of({}, loss=nn.MSELoss(), targets=targets)[0], rel=3e-4)  # 100.5: 4e-3
    seen: list[Tensor] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        if not isinstance(batch[1], FakeTensor):
            seen.append(batch[1])
        return functional.mse_loss(output.float(), batch[1])

    losses_of({"precision": precision}, loss=loss, targets=targets, allow=["bf16", "nearest-rounding"])
    assert {float(one.unique()) for one in seen} == {float(torch.tensor(100.3))}


def test_a_router_s_loss_is_refused_not_left_out() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 16, "num_key_value_heads": 2}
    model = {"architecture": "mixtral", **sizes, **experts, "output_router_logits": True}
    data = {"synthetic": "tokens", "sequence_length": 8}
    with pytest.raises(
        tightfit.InputError, match=r"with the key output_router_logits, its class adds a loss of the routers"
    ):
        losses_of({}, model=model, data=data, loss=None)
    assert losses_of({}, model=model | {"output_router_logits": False}, data=data, loss=None)


def test_a_class_with_another_loss_than_its_task_is_refused() -> None:
    """ProphetNet also predicts the tokens after the next one."""
    sizes = dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_encoder_attention_heads"), 1)
    more = dict.fromkeys(("num_decoder_attention_heads", "ngram"), 1)
    widths = {"vocab_size": 64, "hidden_size": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    model = {"architecture": "prophetnet", **sizes, **more, **widths}
    data = [{"input_ids": torch.arange(4, 12), "labels": torch.arange(4, 12)}] * 8
    with pytest.raises(
        tightfit.InputError, match="the loss of its class also predicts the tokens after the next"
    ) as caught:
        losses_of({}, model=model, data=data, loss=None)
    assert "name the task (model.task)" in caught.value.fix
    assert losses_of({}, model={**model, "task": "seq2seq-lm"}, data=data, loss=None)


class Positions(Perceptron):
    def __init__(self, many: int) -> None:
        super().__init__()
        self.register_buffer("places", torch.arange(float(many)))


@pytest.mark.parametrize(("many", "warned"), [(300, 1), (200, 0)])
def test_positions_that_16_bits_round_are_warned_of(many: int, warned: int) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plan = tightfit.Plan(precision="bf16-true", rounding="kahan")
        tightfit.build(job_of(nn.MSELoss(), model=lambda: Positions(many), allow=["bf16"]), plan)
    said = [
        str(one.message)
        for one in seen
        if "stores the buffer places in bfloat16, which rounds whole numbers above 256" in str(one.message)
    ]
    assert len(said) == warned


@pytest.mark.parametrize(
    ("shape", "words"), [((3,), ""), ((1, 3), ""), ((4, 1), "for each sample"), ((4, 3), "for each sample")]
)
def test_weights_of_the_samples_of_one_batch_are_refused(shape: tuple[int, ...], words: str) -> None:
    samples = [(torch.randn(5), torch.ones(3)) for _ in range(4)]
    job = tightfit.Job(
        model=lambda: nn.Linear(5, 3),
        data=samples,
        loss=nn.BCEWithLogitsLoss(weight=torch.ones(shape)),
        train=tightfit.Train(batch=4, steps=1),
    )

    def trained() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", tightfit.errors.TightfitWarning)  # that a forward could not be checked
            list(tightfit.train(tightfit.build(job, tightfit.Plan(micro_batch=2))))

    if not words:
        trained()
        return
    with pytest.raises(tightfit.InputError, match=words):
        trained()

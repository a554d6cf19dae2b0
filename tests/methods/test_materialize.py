"""Both ways of creating a model give the same model; the device way holds it once, in its final
type."""

import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tightfit.errors import InputError, TightfitError
from tightfit.job import Job, ModelSpec, Train
from tightfit.methods import materialize
from tightfit.methods.materialize import create_on_device, create_on_host, own_parameters, weights_dtype
from tightfit.models import model_factory
from tightfit.models.objective import TASKS
from tightfit.plan import Plan
from tightfit.runtime.run import Run

CPU = torch.device("cpu")
SMALL = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 90}
LLAMA = ModelSpec(architecture="llama", config={**SMALL, "num_key_value_heads": 1})


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


class Initialised(nn.Module):
    """The initialisers that draw into temporaries, in pieces, through views, or in several passes."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.flat = nn.Linear(24, 24), nn.Linear(24, 6)
        self.table = nn.Embedding(10, 6, padding_idx=3)
        self.scale = nn.Parameter(torch.rand(6, dtype=torch.float64))
        self.steps = nn.Buffer(torch.arange(5))
        self.window = nn.Buffer(torch.hann_window(5))
        self.rotary_inv_freq = nn.Buffer(1 / 10 ** torch.arange(4.0))
        nn.init.orthogonal_(self.square.weight)
        nn.init.trunc_normal_(self.flat.weight, std=0.3, a=-0.3, b=0.3)
        nn.init.sparse_(self.square.bias[None].t(), 0.2)
        alias = self.flat.weight.data
        self.table.weight.data.uniform_(-1, 1)
        alias.normal_(0, 0.02).div_(3)  # 16 bits would round twice
        alias[0].mul_(1.7)
        with torch.no_grad():
            self.scale += torch.randn(6)
        self.table.weight.data[4] = torch.randn(6)
        self.copied = copy.deepcopy(self.square)
        nn.init.xavier_normal_(self.copied.weight)
        self.tied = self.flat.weight


def parametrized() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(7, 9))


MODELS: dict[str, Any] = {
    "llama": LLAMA,
    "gpt2 tied": ModelSpec(architecture="gpt2", config={"n_embd": 32, "n_head": 2, "n_layer": 2, "vocab_size": 90}),
    "bert": ModelSpec(architecture="bert", config=SMALL),
    "vit": ModelSpec(
        architecture="vit",
        config={
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 64,
            "image_size": 16,
            "patch_size": 8,
        },
    ),
    "t5": ModelSpec(
        architecture="t5",
        config={"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 90},
    ),
    "convolutional": Convolutional,
    "lstm": lambda: nn.LSTM(12, 10, 2, bidirectional=True),
    "initialised": Initialised,
    "parametrized": parametrized,
    "torch transformer": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3, enable_nested_tensor=False
    ),
}


def created(create: Callable[..., nn.Module], model: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor]:
    """All parameters (under each of their names) and buffers, and the state of the generator after their creation."""
    torch.manual_seed(5)
    module = create(model, CPU, dtype)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(module.named_buffers(remove_duplicate=False))}, torch.random.get_rng_state()


def ties(tensors: dict[str, Tensor]) -> list[int]:
    """For each tensor the position of the first one that is the same object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), position) for position, tensor in enumerate(tensors.values())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_the_same_model(name, dtype):
    assert_same_model(name, dtype)


@pytest.mark.parametrize("name", sorted(set(MODELS) - {"initialised", "parametrized"}))  # these read what they wrote
def test_models_can_be_initialised_one_parameter_at_a_time(monkeypatch, name):
    """Their initialisers write parameters and read none."""
    monkeypatch.setattr(materialize, "SLACK_BYTES", 0)
    assert_same_model(name, torch.bfloat16)


def assert_same_model(name: str, dtype: torch.dtype) -> None:
    host, host_generator = created(create_on_host, MODELS[name], dtype)
    device, device_generator = created(create_on_device, MODELS[name], dtype)
    assert list(device) == list(host)
    for key, expected in host.items():
        assert type(device[key]) is type(expected), key
        assert device[key].dtype == expected.dtype, key
        assert torch.equal(device[key], expected), key
    assert ties(device) == ties(host)
    assert torch.equal(device_generator, host_generator)


def test_values_are_the_fp32_ones_rounded_once():
    usual, _ = created(create_on_host, Initialised, torch.float32)
    half, _ = created(create_on_device, Initialised, torch.bfloat16)
    assert torch.equal(half["flat.weight"], usual["flat.weight"].bfloat16())
    assert not torch.equal(usual["flat.weight"], usual["flat.weight"].bfloat16())


def test_later_writes_through_a_view_are_kept(monkeypatch):
    monkeypatch.setattr(materialize, "SLACK_BYTES", 0)

    def make() -> nn.Module:
        first, second = nn.Linear(9, 9), nn.Linear(9, 9)
        row = first.weight.data[2]
        nn.init.normal_(second.weight)
        row.normal_().div_(3)
        return nn.Sequential(first, second)

    host, _ = created(create_on_host, make, torch.bfloat16)
    device, _ = created(create_on_device, make, torch.bfloat16)
    assert all(torch.equal(device[key], host[key]) for key in ("1.weight", "1.bias"))
    assert torch.equal(device["0.weight"], host["0.weight"])


def test_torch_is_unchanged_afterwards():
    before = nn.Parameter.__deepcopy__, len(nn.modules.module._global_parameter_registration_hooks)
    with pytest.raises(InputError):
        create_on_device(lambda: nn.Linear(-1, 2), CPU, torch.bfloat16)
    assert before == (nn.Parameter.__deepcopy__, len(nn.modules.module._global_parameter_registration_hooks))


@pytest.mark.parametrize("create", [create_on_host, create_on_device])
def test_buffers_that_need_fp32_stay_in_fp32(create):
    kept, _ = created(create, Initialised, torch.bfloat16)
    assert kept["rotary_inv_freq"].dtype == torch.float32
    assert kept["steps"].dtype == torch.int64
    assert kept["window"].dtype == torch.bfloat16
    assert kept["scale"].dtype == torch.float64
    norms, _ = created(create, Convolutional, torch.bfloat16)
    assert {key: str(value.dtype) for key, value in norms.items() if key.startswith("net.1.")} == {
        "net.1.weight": "torch.float32",
        "net.1.bias": "torch.float32",
        "net.1.running_mean": "torch.float32",
        "net.1.running_var": "torch.float32",
        "net.1.num_batches_tracked": "torch.int64",
    }
    assert norms["net.0.weight"].dtype == torch.bfloat16


class Precise(nn.Module):
    """Widened by its author, who casts in forward."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 2).double(), nn.Linear(2, 2)
        self.register_buffer("time", torch.tensor(1e9 + 1, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("create", [create_on_host, create_on_device])
def test_fp64_parameters_stay_in_fp64(create, dtype):
    kept, _ = created(create, Precise, dtype)
    assert kept["wide.weight"].dtype == kept["wide.bias"].dtype == torch.float64
    assert kept["narrow.weight"].dtype == dtype
    assert kept["time"].item() == 1e9 + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_models_with_running_statistics_train_in_16_bits(dtype):
    model = create_on_device(Convolutional, CPU, dtype)
    output = model(torch.randn(2, 3, 8, 8, dtype=dtype))
    output.sum().backward()
    assert output.dtype == dtype
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert int(model.net[1].num_batches_tracked) == 1
    assert model.eval()(torch.randn(2, 3, 8, 8, dtype=dtype)).dtype == dtype


def test_running_statistics_keep_small_updates_in_16_bits():
    norm = create_on_device(lambda: nn.BatchNorm1d(1, momentum=1 - 0.9 ** (1 / 16)), CPU, torch.bfloat16)
    for _ in range(1000):  # in bf16 the mean would stop at 0.75, where an update is less than half a unit of rounding
        norm(torch.tensor([[0.5], [1.5]], dtype=torch.bfloat16))
    assert norm.running_mean.item() == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", ["llama", "gpt2 tied", "bert", "t5"])
def test_language_models_run_in_bf16(name):
    model = create_on_device(MODELS[name], CPU, torch.bfloat16)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    if name == "t5":
        inputs["decoder_input_ids"] = torch.tensor([[0, 1]])
    assert model(**inputs).logits.dtype == torch.bfloat16


class LiveBytes(TorchDispatchMode):
    """The most bytes that were alive at once in storages of tensors that operations returned."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self.live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.live = {key: item for key, item in self.live.items() if not item[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return output


def peak_bytes(create: Callable[..., nn.Module], model: Any) -> int:
    with LiveBytes() as seen:
        create(model, CPU, torch.bfloat16)
    return seen.peak


WIDE = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 12,
    "intermediate_size": 512,
    "vocab_size": 512,
}


@pytest.mark.parametrize(
    "model",
    [
        ModelSpec(architecture="llama", config=WIDE),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 512), 20, enable_nested_tensor=False),
    ],
    ids=["llama", "copied layers"],
)
def test_the_device_way_never_holds_the_fp32_model(model):
    full = 4 * sum(parameter.numel() for parameter in model_factory(model)().parameters())
    assert full > 30e6
    assert peak_bytes(create_on_host, model) > full
    assert peak_bytes(create_on_device, model) < 0.5 * full + 2 * materialize.SLACK_BYTES + 2 * 256 * 512 * 4


def test_a_pretrained_folder_is_never_in_memory_in_fp32(tmp_path, monkeypatch):
    spec = ModelSpec(architecture="llama", config=WIDE)
    create_on_host(spec, CPU, torch.float32).save_pretrained(tmp_path)
    folder = ModelSpec.parse({"from": str(tmp_path)})
    full = 4 * sum(parameter.numel() for parameter in model_factory(folder)().parameters())
    monkeypatch.delattr("transformers.core_model_loading.ThreadPoolExecutor")  # no thread reads ahead
    assert 0.5 * full <= peak_bytes(create_on_device, folder) < 0.65 * full
    assert "HF_DEACTIVATE_ASYNC_LOAD" not in os.environ


@pytest.mark.filterwarnings("ignore:model.from=.*has no weights for cls.predictions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_both_ways_load_a_folder_and_fill_gaps_the_same(tmp_path, stored, dtype):
    spec = ModelSpec(architecture="bert", task="causal-lm", config={**SMALL, "tie_word_embeddings": False})
    create_on_host(spec, CPU, torch.float32).to(stored).bert.save_pretrained(tmp_path)
    folder = ModelSpec.parse({"from": str(tmp_path), "task": "masked-lm"})
    host, _ = created(create_on_host, folder, dtype)
    device, _ = created(create_on_device, folder, dtype)
    assert list(device) == list(host)
    assert all(device[key].dtype == host[key].dtype and torch.equal(device[key], host[key]) for key in host)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_created_on_the_meta_device(name):
    with torch.device("meta"):
        model = create_on_device(MODELS[name], CPU, torch.bfloat16)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.bfloat16 in {parameter.dtype for parameter in model.parameters()}


def test_a_model_of_fake_tensors_keeps_its_tied_weights():
    with FakeTensorMode():
        model = create_on_device(MODELS["gpt2 tied"], CPU, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.transformer.wte.weight


def test_lazy_modules_are_refused():
    with pytest.raises(InputError, match="lazy"):
        create_on_device(lambda: nn.LazyLinear(3), CPU, torch.bfloat16)


@pytest.mark.parametrize("way", ["host", "device"])
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("fp32", torch.float32),
        ("bf16-mixed", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("fp16-true", torch.float16),
    ],
)
def test_a_run_gets_its_model_and_its_loss(way, precision, dtype):
    plan = Plan(materialize=way, precision=precision)
    job = Job(model=LLAMA, data={"synthetic": "tokens"})
    unset: Any = None
    run = Run(
        job=job,
        plan=plan,
        device=CPU,
        objective=TASKS["causal-lm"],
        model=unset,
        loss_sum=unset,
        data=unset,
        optimizer=unset,
        learning_rate=unset,
    )
    assert materialize.enabled(plan)
    run = materialize.apply(run, plan)
    assert weights_dtype(plan) == dtype
    assert {parameter.dtype for parameter in run.model.parameters()} == {dtype}
    tokens = torch.tensor([[1, 2, 3, 4]])
    assert run.loss_sum({"input_ids": tokens, "labels": tokens}).isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_the_same_model_on_a_gpu(name, dtype):
    device = torch.device("cuda", 0)
    torch.manual_seed(5)
    host = create_on_host(MODELS[name], device, dtype).state_dict()
    torch.manual_seed(5)
    straight = create_on_device(MODELS[name], device, dtype).state_dict()
    assert all(straight[key].device == device and torch.equal(straight[key], host[key]) for key in host)


class Reads(nn.Module):
    """Reads a value while it is created."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scale = float(self.layers[0].weight.detach().norm())


def test_a_model_that_a_stage_cannot_create_is_refused():
    job = Job(model=Reads, data=[(torch.zeros(4), 0)] * 4, train=Train(batch=2, steps=1))
    run = SimpleNamespace(job=job, mesh=SimpleNamespace(rank=lambda axis: 0))
    with pytest.raises(InputError, match="materialize: host"):
        own_parameters(run, Plan(pp=2, materialize="device"))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_reads_its_own_weights_of_a_folder(rank: int, tied: bool, tmp_path):
    """transformers reads the weights in the order of their names: layer 10 comes before layer 2."""
    config = {**SMALL, "num_hidden_layers": 11, "tie_word_embeddings": tied}
    whole = create_on_host(ModelSpec(architecture="llama", config=config), CPU, torch.float32)
    whole.save_pretrained(tmp_path, max_shard_size="100KB")
    job = Job(
        model={"from": str(tmp_path)}, data={"synthetic": "tokens", "sequence_length": 8}, train=Train(batch=2, steps=1)
    )
    run = SimpleNamespace(job=job, mesh=SimpleNamespace(rank=lambda axis: rank))
    plan = Plan(pp=2, materialize="device", split=(6, 5))
    own = own_parameters(run, plan)
    stage = create_on_device(job.model, CPU, torch.float32, None, own)
    materialize._check_values(run, plan, stage)
    expected, mine = whole.state_dict(), range(6) if rank == 0 else range(6, 11)
    names = {name for name in expected if any(name.startswith(f"model.layers.{number}.") for number in mine)}
    names |= {"model.embed_tokens.weight"} if rank == 0 or tied else {"lm_head.weight"}
    for name, found in stage.state_dict().items():
        if name in names:
            assert torch.equal(found, expected[name]), name
        elif "layers" in name:
            assert not any(found.stride()), name


def test_a_stage_without_its_values_is_refused():
    model = create_on_host(LLAMA, CPU, torch.float32)
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = torch.zeros(()).expand(weight.shape)
    run = SimpleNamespace(job=SimpleNamespace(blocks_name=None), mesh=SimpleNamespace(rank=lambda axis: 1))
    with pytest.raises(
        TightfitError, match=r"left model\.layers\.1\.mlp\.up_proj\.weight without values on pipeline rank 1"
    ):
        materialize._check_values(run, Plan(pp=2, materialize="device"), model)

"""A step reads no number of its device: its figures are copied, and read when someone asks for
them.

Micro-batches are copied to the device one ahead.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tests import tiny
from tightfit.distributed.mesh import PendingSum
from tightfit.engine.agreement import StopPoll
from tightfit.engine.delayed_readings import StepTimer, begin_reading
from tightfit.engine.rng import seed_all
from tightfit.engine.step import CountSums, Step, accumulate, skips_on_found_inf, take_step, with_fields
from tightfit.methods.precision import LossScalerOnDevice
from tightfit.models.masks import has_sequential_positions, without_mask_checks
from tightfit.planner.tracing.device_emulation import emulate_device
from tightfit.runtime.copy_stream import BatchPrefetcher
from tightfit.runtime.run import DummyMicroBatch, Run, device_batches, without_full_masks


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.count += 1
        return function(*args, **(kwargs or {}))


def counted(run: Run) -> Run:
    """The run with labels that are counted by their shape: they lie on the host, and reading there waits for nobody. And as it is
    built for CUDA."""
    objective = replace(run.objective, count=lambda batch: batch["labels"][:, 1:].numel())
    return replace(run, objective=objective, loss_sum=without_mask_checks(run.loss_sum, run.model))


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_step_reads_no_number_of_the_device(precision: str, optimizer: str) -> None:
    plan = tightfit.Plan(precision=precision, micro_batch=2, fused_optimizer=True)
    run = counted(tightfit.build(tiny.job(clip=0.5, optimizer=optimizer), plan))
    if run.loss_scale is not None:
        run = replace(run, loss_scale=LossScalerOnDevice(2.0**10, True, run.device))
    steps = run.data.steps(0, None)
    take_step(run, next(steps), 0)  # which makes the optimizer's states
    micro_batches = next(steps)
    with Reads() as reads:
        step = take_step(run, micro_batches, 1)
        assert reads.count == 0
        assert step.loss > 0
        assert step.gradient_norm is not None
        assert not step.skipped
        assert reads.count > 0


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "lamb"])
def test_an_fp16_step_without_a_fused_kernel_reads_nothing(optimizer: str) -> None:
    """The first step is exempt, because it creates states. The host reads whether a step was
    skipped only before the next step."""
    with emulate_device("cuda"):
        run = counted(tightfit.build(tiny.job(clip=0.5, optimizer=optimizer), tightfit.Plan(precision="fp16-mixed")))
        assert isinstance(run.loss_scale, LossScalerOnDevice)
        steps = run.data.steps(0, None)
        take_step(run, next(steps), 0)
        assert skips_on_found_inf(run.optimizer)
        for step, reads in ((1, 0), (2, 1)):
            micro_batches = next(steps)
            with Reads() as mode:
                take_step(run, micro_batches, step)
                assert mode.count == reads


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
def test_a_loss_scale_on_the_device_trains_the_same(optimizer: str) -> None:
    plan = tightfit.Plan(precision="fp16-mixed", fused_optimizer=optimizer != "lion")
    found = []
    for on_device in (False, True):
        run = tightfit.build(tiny.job(optimizer=optimizer, clip=0.5, steps=12), plan)
        assert run.loss_scale is not None
        run.loss_scale.value = 2.0**26  # some steps are left out
        if on_device:
            run = replace(run, loss_scale=LossScalerOnDevice(2.0**26, True, run.device, patience=3))
        else:
            run.loss_scale.patience = 3  # type: ignore[attr-defined]
        steps = [(step.loss, step.gradient_norm, step.skipped) for step in tightfit.train(run)]
        assert run.loss_scale is not None
        found.append((steps, run.loss_scale.state_dict(), [weight.clone() for weight in run.model.parameters()]))
    (host, state, weights), (device, its_state, its_weights) = found
    assert 0 < sum(skipped for *_, skipped in host) < 12
    assert [skipped for *_, skipped in host] == [skipped for *_, skipped in device]
    assert state == its_state
    torch.testing.assert_close(host, device, equal_nan=True, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weights, its_weights, rtol=1e-6, atol=1e-7)


def test_a_loss_scale_on_the_device_resumes_from_its_state() -> None:
    scaler, other = (LossScalerOnDevice(8.0, True, torch.device("cpu"), patience=3) for _ in range(2))
    for finite in (False, True, True):
        scaler.update(torch.tensor(finite))
    before = scaler.factor
    other.load_state_dict(scaler.state_dict())
    scaler.update(torch.tensor(True))
    other.update(True)
    assert before == 4.0  # what a step was given stays as it is
    assert other.state_dict() == scaler.state_dict() == {"value": 8.0, "skipped": 1, "finite_steps": 0}


def test_positions_are_checked_only_if_the_batch_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for packed sequences in the batch's position ids, not in those that the model makes."""
    from transformers import masking_utils

    checked: list[Tensor] = []
    find = masking_utils.find_packed_sequence_indices

    def noted(position_ids: Tensor) -> Tensor | None:
        checked.append(position_ids)
        return find(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", noted)
    run = tightfit.build(tiny.job())
    run.model.eval()
    batch = run.data.example()
    packed = {**batch, "position_ids": torch.tensor([[*range(8), *range(8)]]).expand(len(batch["input_ids"]), -1)}
    unread = without_mask_checks(run.loss_sum, run.model)
    for one, times in ((batch, 0), (packed, 1)):
        checked.clear()
        found = unread(one)
        assert len(checked) == times
        assert torch.equal(found, run.loss_sum(one))
    assert masking_utils.find_packed_sequence_indices is noted


class Own(torch.nn.Linear):
    """Such a model computes positions that the host cannot know."""


def test_positions_derived_from_tokens_are_checked() -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

    sharded = type("FSDPRobertaEmbeddings", (FSDPModule, RobertaEmbeddings), {})  # as fully_shard makes of a class
    small = tightfit.build(tiny.job()).model
    assert has_sequential_positions(small)
    assert has_sequential_positions(Gemma3RMSNorm(4))  # whose file numbers images
    for kind in (Own, RobertaEmbeddings, sharded):
        odd = object.__new__(kind)
        torch.nn.Module.__init__(odd)
        assert not has_sequential_positions(odd)
        assert without_mask_checks(abs, odd) is abs  # type: ignore[arg-type, comparison-overlap]
    assert without_mask_checks(abs, small) is not abs  # type: ignore[arg-type, comparison-overlap]


SMALL_MODELS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "llama": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "t5": {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_kv": 8, "d_ff": 16, "decoder_start_token_id": 0},
    "bart": {
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_padding_mask_is_not_read_on_the_device(name: str, attention: str) -> None:
    """Encoders, decoders and both make up to three masks of it; the outputs are the same."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

    both = name in ("t5", "bart")
    kinds: dict[str, Any] = {"bert": AutoModelForMaskedLM, **dict.fromkeys(("t5", "bart"), AutoModelForSeq2SeqLM)}
    config = AutoConfig.for_model(name, vocab_size=32, use_cache=False, **SMALL_MODELS[name])
    model = kinds.get(name, AutoModelForCausalLM).from_config(config, attn_implementation=attention).eval()
    ids = torch.arange(16).view(2, 8)
    batch: dict[str, Any] = {"input_ids": ids, "attention_mask": (ids < 13).long()}
    if both:
        batch |= {"decoder_input_ids": ids + 1, "decoder_attention_mask": (ids < 12).long()}

    def loss_sum(given: Any) -> Tensor:
        return model(**given).logits.square().sum()

    reads = []
    for function in (loss_sum, without_mask_checks(loss_sum, model, without_full=True)):
        with Reads() as mode:
            reads.append((function(batch), mode.count))
    (plain, asked), (unread, more) = reads
    assert torch.equal(plain, unread)
    assert more == 0
    assert asked > 0 or (attention == "eager" and name in ("gpt2", "llama"))


def test_masks_that_hide_nothing_are_dropped_individually() -> None:
    run: Any = SimpleNamespace(droppable_masks=("attention_mask", "decoder_attention_mask"))
    full, padded = torch.ones(2, 3), torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = {"input_ids": padded, "attention_mask": padded, "decoder_attention_mask": full}
    assert without_full_masks(batch, run).keys() == {"input_ids", "attention_mask"}
    assert without_full_masks({"attention_mask": full}, run) == {}
    assert without_full_masks({"attention_mask": full[0]}, run).keys() == {"attention_mask"}
    assert without_full_masks(padded, run) is padded


def test_the_host_handles_the_first_fused_momentum_update() -> None:
    """torch's kernel, told to change nothing, would leave uninitialised momenta."""
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    for momentum, plain in ((0.0, True), (0.9, False)):
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, fused=True)
        assert skips_on_found_inf(optimizer) == plain
        optimizer.step()
        assert skips_on_found_inf(optimizer)
    assert not skips_on_found_inf(torch.optim.SGD([weight], lr=0.1))
    assert skips_on_found_inf(torch.optim.AdamW([weight], lr=0.1, fused=True))


def test_figures_of_a_step_are_read_on_access() -> None:
    asked: list[str] = []

    def late(name: str, value: Any) -> Any:
        def read() -> Any:
            asked.append(name)
            return value

        return read

    def make() -> Step:
        return Step(3, late("loss", 0.5), 0.1, late("norm", 2.0), 4, 60, 64, late("skipped", False))

    plain = Step(3, 0.5, 0.1, 2.0, 4, 60, 64, False)
    step = with_fields(make(), seconds=late("seconds", 1.0))
    assert asked == []
    assert step.loss == step.loss == 0.5
    assert asked == ["loss"]
    assert step.seconds == 1.0
    assert make() == plain
    assert hash(make()) == hash(plain)
    assert repr(make()) == repr(plain)
    assert replace(make(), samples=5) == replace(plain, samples=5)
    assert copy.copy(make()) == plain
    assert pickle.loads(pickle.dumps(make())) == plain
    assert vars(pickle.loads(pickle.dumps(make()))) == vars(plain)
    with pytest.raises(AttributeError):
        step.loss = 1.0  # type: ignore[misc]


def test_the_loop_reads_no_figure_of_a_step() -> None:
    run = tightfit.build(tiny.job())

    def take(run: Run, micro_batches: list[Any], step: int) -> Step:
        def read() -> Any:
            raise AssertionError("nobody asked")

        unread: Any = read
        return Step(step, unread, 0.1, unread, unread, unread, unread, unread)

    assert [step.step for step in tightfit.train(run, take=take)] == list(range(8))


def test_numbers_are_read_once() -> None:
    number = torch.tensor(2.5)
    read = begin_reading({"one": number, "two": 3})
    assert read() == {"one": 2.5, "two": 3.0}
    number.fill_(7.0)
    assert read()["one"] == 2.5


def test_on_a_cpu_every_number_is_read_in_its_own_step() -> None:
    poll = StopPoll(tightfit.build(tiny.job()))
    assert [poll.largest(number) for number in (0, 15, 0)] == [0, 15, 0]


def test_items_counted_on_the_device_give_the_same_gradients() -> None:
    run = tightfit.build(tiny.job(), tightfit.Plan(micro_batch=3))
    (micro_batches, *_) = run.data.steps(0, 4)
    gradients = []
    for items in (59, torch.tensor(59)):
        seed_all(1)
        accumulate(run, micro_batches, lambda items=items: items)  # type: ignore[misc]
        gradients.append([weight.grad for weight in run.model.parameters()])
        run.optimizer.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))  # type: ignore[arg-type]


def test_offloaded_gradients_are_clipped_on_the_device() -> None:
    weights = []
    content = tiny.content(clip=0.05, optimizer="sgd")
    model = {**content["model"], "attention_dropout": 0.0}
    job = tightfit.Job.parse({**content, "model": model, "allow": ["offload"]})
    for offloaded in (False, True):
        plan = tightfit.Plan(offload=("gradients",), offload_to="disk") if offloaded else tightfit.Plan()
        with emulate_device("cuda") if offloaded else nullcontext():
            run = tightfit.build(job, plan)
            seed_all(1)
            for number, micro_batches in zip(range(3), run.data.steps(0, None), strict=False):
                step = take_step(run, micro_batches, number)
                assert step.gradient_norm is not None
                assert step.gradient_norm > 0.05
        weights.append([weight.detach().clone() for weight in run.model.parameters()])
        if offloaded:
            assert run.store is not None
            assert run.store.factor is None
    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)


def batches(*sizes: int) -> list[Any]:
    return [{"input_ids": torch.full((size, 3), number), "name": "x"} for number, size in enumerate(sizes)]


def placed(batch: Any, copy: Any) -> Any:
    return {name: copy(value) if isinstance(value, Tensor) else value for name, value in batch.items()}


def test_micro_batches_are_prefetched_into_two_buffers() -> None:
    uploads = BatchPrefetcher(torch.device("cpu"))
    for sizes in ((2, 2, 1), (2, 2), (1, 2), (2,)):
        given = batches(*sizes)
        seen = []
        for there, batch in zip(uploads.prefetch(given, placed), given, strict=True):
            assert there["name"] == "x"
            assert torch.equal(there["input_ids"], batch["input_ids"])
            assert there["input_ids"].data_ptr() != batch["input_ids"].data_ptr()
            seen.append(there["input_ids"])
        assert len(seen) == len(sizes)


def test_the_first_micro_batch_uses_the_reserved_buffer() -> None:
    uploads = BatchPrefetcher(torch.device("cpu"))
    list(uploads.prefetch(batches(2, 2), placed))
    assert uploads._reserved is not None
    (reserved,) = uploads._reserved.tensors
    first, *_ = uploads.prefetch(batches(2, 1), placed)
    assert first["input_ids"] is reserved
    assert uploads._reserved.tensors[0] is not reserved


def test_prefetching_micro_batches_does_not_change_training() -> None:
    job, plan = tiny.job(steps=None, epochs=2.0), tightfit.Plan(micro_batch=3)  # steps of two sizes, the last one short
    found = []
    for uploads in (None, BatchPrefetcher(torch.device("cpu"))):
        run = replace(tightfit.build(job, plan), prefetcher=uploads)
        found.append([(step.loss, step.samples) for step in tightfit.train(run)])
    assert found[0] == found[1]
    assert len({samples for _, samples in found[0]}) == 2


class TwoDevices:
    """A mesh of two devices along which samples are divided, as the first of them sees it."""

    def size(self, axis: str) -> int:
        return 2 if axis == "dp_replicate" else 1

    def begin_all_reduce(self, values: Tensor, axes: tuple[str, ...]) -> Any:
        return PendingSum(values * 2)


def test_all_reduced_counts_stay_on_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(Tensor, "to", lambda tensor, device, non_blocking: tensor)
    run: Any = SimpleNamespace(mesh=TwoDevices(), executor=None, device=SimpleNamespace(type="cuda"))
    with Reads() as reads:
        counts = CountSums(run, [60, 4, 64]).wait()
        assert reads.count == 0
    assert all(isinstance(count, Tensor) for count in counts)
    assert [int(count) for count in counts] == [120, 8, 128]


def test_dummy_micro_batches_are_prefetched_too() -> None:
    run = replace(tightfit.build(tiny.job()), prefetcher=BatchPrefetcher(torch.device("cpu")))
    one, two = batches(2, 2)
    found = list(device_batches([one, DummyMicroBatch(two)], run))
    assert [batch["input_ids"][0, 0].item() for batch in found] == [0, 1]


class Line:
    """Replaces a stream and notes its work. An event is a position in it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.given = name, log, 0

    def give(self, what: str) -> None:
        self.given += 1
        self.log.append(f"{self.name}: {what}")

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for {event.line.name} {event.place}")


class Mark:
    line: Line
    place: int

    def record(self, line: Line) -> None:
        self.line, self.place = line, line.given


def on_lines(monkeypatch: pytest.MonkeyPatch) -> tuple[BatchPrefetcher, Line, Line]:
    """A prefetcher, the stream of the work and that of the copies. Both write to one log."""
    log: list[str] = []
    own, beside = Line("work", log), Line("copies", log)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: own)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: True)
    uploads = BatchPrefetcher(torch.device("cpu"))
    uploads._stream = beside  # type: ignore[assignment]
    return uploads, own, beside


def test_a_copy_waits_for_its_buffer_and_compute_for_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, own, beside = on_lines(monkeypatch)
    log = own.log

    def place(batch: Any, copy: Any) -> Any:
        there = placed(batch, copy)
        beside.give(f"batch {batch['input_ids'][0, 0].item()}")
        return there

    for _ in range(2):
        for there in uploads.prefetch(batches(2, 2), place):
            own.give(f"work at {there['input_ids'][0, 0].item()}")
        own.give("update")
    assert log == [
        "copies waits for work 0",
        "copies: batch 0",
        "copies waits for work 0",
        "copies: batch 1",
        "work waits for copies 1",
        "work: work at 0",
        "work waits for copies 2",
        "work: work at 1",
        "work: update",
        "copies waits for work 1",  # the buffer existed before the last micro-batch's work, so the copy overlaps with it
        "copies: batch 0",
        "copies waits for work 3",
        "copies: batch 1",
        "work waits for copies 3",
        "work: work at 0",
        "work waits for copies 4",
        "work: work at 1",
        "work: update",
    ]


def test_a_step_that_ends_early_waits_for_pending_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    uploads, own, _ = on_lines(monkeypatch)
    log = own.log
    coming: Iterator[Any] = uploads.prefetch(batches(2, 2), placed)
    next(coming)
    before = len(log)
    coming.close()  # type: ignore[attr-defined]
    assert log[before:] == ["work waits for copies 0"]


def test_the_step_clock_is_at_most_one_step_late(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        made = 0

        def __init__(self, **options: Any) -> None:
            Event.made += 1
            self.number = Event.made

        def record(self, stream: Any) -> None:
            log.append(f"record {self.number}")

        def synchronize(self) -> None:
            log.append(f"wait for {self.number}")

        def elapsed_time(self, other: Event) -> float:
            return 1000.0 * (other.number - self.number)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    clock = StepTimer(SimpleNamespace(type="cuda"))  # type: ignore[arg-type]
    seconds = []
    for _ in range(2):
        clock.begin()
        seconds.append(clock.end())
    assert log == ["record 1", "record 2", "record 3", "record 4", "wait for 2"]
    assert [wait() for wait in seconds if callable(wait)] == [1.0, 1.0]


class Copied:
    """Replaces page-locked memory."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def copy_(self, values: Tensor, non_blocking: bool) -> None:
        assert non_blocking
        self.log.append("copy")
        self.values = values

    def tolist(self) -> list[float]:
        self.log.append("read")
        return self.values.tolist()


class OnDevice(Tensor):
    """A scalar that says it lies on a CUDA device."""

    is_cuda = True  # type: ignore[assignment]


def test_device_values_are_copied_at_once_and_awaited_when_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

    monkeypatch.setattr(torch, "empty", lambda *shape, **options: Copied(log))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    loss, items = torch.tensor(1.5).as_subclass(OnDevice), torch.tensor(2**40 + 1).as_subclass(OnDevice)
    read = begin_reading({"loss": loss, "norm": torch.tensor(2.0), "items": items})
    assert log == ["copy", "record"]
    assert read() == read() == {"norm": 2.0, "loss": 1.5, "items": 2.0**40 + 1}
    assert log == ["copy", "record", "wait", "read"]
    assert not [value for value in vars(read).values() if isinstance(value, Copied | Event)]

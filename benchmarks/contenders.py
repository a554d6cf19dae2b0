"""Run a plain compiled loop, transformers' Trainer and tightfit on the same job, in turns.

benchmarks/gpu.py starts a Crew of them, each in a process of its own. They prepare themselves side by
side (model, compiler, a few steps of every micro-batch). From then on one works at a time, when it is
told to, so that a slow period of the machine affects all of them. A turn is timed as a whole, between
two points at which the device is idle. So the timing makes no contender wait for the device at each
step.

All contenders start with the same allocator settings: those that `tightfit train` starts with.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = ("plain", "trainer", "tightfit")
MARK = "contender says "  # begins a line that answers the crew; libraries print others
ALLOW = ["bf16"]
TURN_S = 60.0  # that a turn may take


# --- the crew, in the process that tells them what to do ------------------------------------------------------------


class Crew:
    """Contenders of one job. able: the kinds that are ready to run."""

    def __init__(self, asked: dict[str, Any], work: Path) -> None:
        self.asked, self.work = asked, work
        self.able: list[str] = []
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._answers: dict[str, queue.Queue[dict[str, Any]]] = {}

    def __enter__(self) -> Crew:
        from tightfit import Plan
        from tightfit.engine import launch

        path = self.work / "contenders.asked.json"
        path.write_text(json.dumps(self.asked))
        added = launch.environment(Plan(allocator="tuned"), self.asked["device"], os.environ)
        for kind in KINDS:
            log = (self.work / f"{kind}.contender.txt").open("w")
            process = subprocess.Popen(
                [sys.executable, __file__, kind, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **added},
            )
            log.close()
            self._processes[kind], self._answers[kind] = process, queue.Queue()
            threading.Thread(target=self._listen, args=(kind,), daemon=True).start()
        return self

    def _listen(self, kind: str) -> None:
        out = self._processes[kind].stdout
        assert out is not None
        for line in out:
            if line.startswith(MARK):
                self._answers[kind].put(json.loads(line.removeprefix(MARK)))
        self._answers[kind].put({"said": f"{kind}: its process ended\n{self._last_words(kind)}"})

    def _last_words(self, kind: str) -> str:
        return (self.work / f"{kind}.contender.txt").read_text(errors="replace")[-1500:]

    def ready(self, limit_s: float) -> dict[str, dict[str, Any]]:
        """What each says of itself once it is ready, or why it is not; those that are choose their micro-batch, in turn."""
        until = time.monotonic() + limit_s
        found = {kind: self._answer(kind, max(until - time.monotonic(), 0.1)) for kind in KINDS}
        for kind in KINDS:  # when all have done what they do side by side
            if "said" not in found[kind]:
                found[kind] |= self._ask(kind, {"do": "choose"})
            if "said" not in found[kind]:
                self.able.append(kind)
        return found

    def take(self, kind: str, steps: int) -> dict[str, Any]:
        """A turn: mean seconds of a step, the last loss, and the most bytes that a GPU has held of tensors."""
        found = self._ask(kind, {"do": "steps", "steps": steps})
        if "said" in found:
            raise AssertionError(found["said"])
        return found

    def kernels(self, kind: str, steps: int) -> list[dict[str, Any]]:
        found = self._ask(kind, {"do": "profile", "steps": steps})
        if "said" in found:
            raise AssertionError(found["said"])
        return found["kernels"]

    def _ask(self, kind: str, what: dict[str, Any]) -> dict[str, Any]:
        to = self._processes[kind].stdin
        assert to is not None
        try:
            to.write(json.dumps(what) + "\n")
            to.flush()
        except OSError:  # it has ended, and its last words are in the queue
            pass
        return self._answer(kind, TURN_S)

    def _answer(self, kind: str, limit_s: float) -> dict[str, Any]:
        try:
            return self._answers[kind].get(timeout=limit_s)
        except queue.Empty:
            return {"said": f"{kind}: no answer in {limit_s:.0f} s\n{self._last_words(kind)}"}

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()


# --- a contender, in a process of its own ---------------------------------------------------------------------------

Steps = Iterator[Any]
"""Takes a step each time it is asked for the next; yields its loss, of which `float` is the first to wait for the device."""


def job_of(asked: dict[str, Any], steps: int) -> Any:
    import tightfit

    data = {"synthetic": "tokens", "sequence_length": asked["length"], "samples": 8 * asked["batch"]}
    train = tightfit.Train(batch=asked["batch"], steps=steps, learning_rate=3e-4, weight_decay=0.1, trackers=())
    return tightfit.Job(model=asked["model"], data=data, train=train, allow=ALLOW)


def batches_of(job: Any, count: int) -> list[dict[str, Any]]:
    """The first batches of a job as tightfit's loader makes them, on the host: {"input_ids", "labels", ...} of (batch, length)."""
    from typing import cast

    import torch

    import tightfit
    from tightfit.methods import loader
    from tightfit.runtime.run import Run

    nothing, plan = cast(Any, None), tightfit.Plan()
    empty = Run(job, plan, torch.device("cpu"), nothing, nothing, nothing, nothing, nothing, nothing)
    return [batch for (batch,) in itertools.islice(loader.apply(empty, plan).data.steps(0, None), count)]


def make_model(job: Any) -> Any:
    """The job's model in fp32 on the host, as its seed makes it."""
    import torch

    from tightfit.models import model_factory

    torch.manual_seed(job.train.seed)
    model = model_factory(job.model)()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return model.train()


def plain(asked: dict[str, Any], micro_batch: int) -> Steps:
    """The loop that one would write for speed: bf16 autocast, torch.compile, fused AdamW; it waits for no loss."""
    import torch

    job, device = job_of(asked, 1), asked["device"]
    model = make_model(job).to(device)
    settings = job.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=settings.learning_rate,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,
    )
    forward = torch.compile(model, dynamic=False) if asked["compile"] else model
    batches = batches_of(job, 8)
    if device == "cuda":
        batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
    share = micro_batch / asked["batch"]
    for batch in itertools.cycle(batches):
        loss: Any = 0.0
        columns = {name: value.to(device, non_blocking=True).split(micro_batch) for name, value in batch.items()}
        for part in zip(*columns.values(), strict=True):
            with torch.autocast(device, torch.bfloat16):
                mean = forward(**dict(zip(columns, part, strict=True))).loss * share
            mean.backward()
            loss = loss + mean.detach()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def trainer(asked: dict[str, Any], micro_batch: int) -> Steps:
    """transformers' Trainer with what its documentation recommends for speed. It has a thread of its own, and waits before each
    of its steps until it is asked for it."""
    go, done = threading.Semaphore(0), queue.Queue[Any]()
    stopped = threading.Event()

    def work() -> None:
        try:
            _train_with_trainer(asked, micro_batch, go, done, stopped)
            done.put(StopIteration())
        except BaseException as error:  # it is raised where the steps are asked for
            done.put(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while True:
            go.release()
            found = done.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        stopped.set()
        go.release()
        thread.join(timeout=TURN_S / 2)


def _train_with_trainer(
    asked: dict[str, Any], micro_batch: int, go: threading.Semaphore, done: queue.Queue[Any], stopped: threading.Event
) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    job = job_of(asked, 1)
    samples = [
        {name: value[row] for name, value in batch.items()}
        for batch in batches_of(job, 8)
        for row in range(asked["batch"])
    ]

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.acquire()

        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> Any:
            done.put(None)  # its losses are its own; the last is computed from the model
            control.should_training_stop = stopped.is_set()
            return control

    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=asked["batch"] // micro_batch,
            max_steps=100_000,
            learning_rate=job.train.learning_rate,
            weight_decay=job.train.weight_decay,
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            logging_nan_inf_filter=False,  # which would wait for each loss
            use_cpu=asked["device"] == "cpu",
            disable_tqdm=True,
            bf16=True,
            torch_compile=asked["compile"],
            optim="adamw_torch_fused",
        )
        Trainer(model=make_model(job), args=options, train_dataset=samples, callbacks=[Turns()]).train()


def with_tightfit(asked: dict[str, Any], plan: Any) -> Steps:
    import tightfit

    run = tightfit.build(job_of(asked, 100_000), plan)
    for step in tightfit.train(run):
        yield LateLoss(step)


class LateLoss:
    """The loss of a tightfit step. Only `float` waits for the device, as with the others' tensors."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __float__(self) -> float:
        return float(self.step.loss)


class Contender:
    """One kind: its generators of steps by micro-batch, of which the fastest is kept when it is told to choose."""

    def __init__(self, kind: str, asked: dict[str, Any]) -> None:
        self.kind, self.asked = kind, asked
        self.ways: dict[str, Steps] = {}
        self.told: dict[str, Any] = {}
        if kind == "tightfit":
            import tightfit

            best = tightfit.search(
                job_of(asked, asked["planned_steps"]), pins={"precision": "bf16-mixed", **asked["pins"]}
            )[0]
            self.told = {"plan": best.plan.differences(), "predicted_tokens_per_s": best.tokens_per_s}
            self.ways["as planned"] = with_tightfit(asked, best.plan)
        else:
            make = {"plain": plain, "trainer": trainer}[kind]
            self.ways = {f"micro_batch {size}": make(asked, size) for size in asked["micro_batches"]}
        for steps in self.ways.values():  # which compiles; the others that prepare themselves meanwhile need room, too
            self._timed(steps, 1)
            self._give_back()

    def _idle(self) -> None:
        import torch

        if self.asked["device"] == "cuda":
            torch.cuda.synchronize()

    def _timed(self, steps: Steps, count: int) -> tuple[float, Any]:
        """Mean seconds of a step, and the last loss."""
        self._idle()
        began = time.perf_counter()
        loss = deque(itertools.islice(steps, count), maxlen=1).pop()
        self._idle()
        return (time.perf_counter() - began) / count, None if loss is None else float(loss)

    def _give_back(self) -> None:
        """Give back what the allocator holds of a GPU and no tensor uses, and count the peak from here."""
        import gc

        import torch

        gc.collect()
        if self.asked["device"] == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def choose(self) -> dict[str, Any]:
        """Time each way for a few steps; keep the fastest and let go of the others."""
        seconds = {name: self._timed(steps, self.asked["tried"])[0] for name, steps in self.ways.items()}
        best = min(seconds, key=lambda name: seconds[name])
        for name in list(self.ways):
            if name != best:
                self.ways.pop(name).close()  # type: ignore[attr-defined]
        self._give_back()
        return {**self.told, "chosen": best, "tried_s": seconds}

    def take(self, count: int) -> dict[str, Any]:
        import torch

        (steps,) = self.ways.values()
        seconds, loss = self._timed(steps, count)
        peak = torch.cuda.max_memory_allocated() if self.asked["device"] == "cuda" else None
        return {"step_s": [seconds], "loss": loss, "peak_bytes": peak}

    def profile(self, count: int) -> dict[str, Any]:
        from benchmarks.gpu_parts import kernels_of

        (steps,) = self.ways.values()
        return {"kernels": kernels_of(lambda: next(steps), count, self.asked["device"])}


def serve(kind: str, asked: dict[str, Any]) -> None:
    """Prepare, say so, and then answer each line of the standard input."""
    told = _or_said(lambda: Contender(kind, asked))
    if isinstance(told, dict):
        _say(told)
        return
    _say({"ready": kind})
    for line in sys.stdin:
        what = json.loads(line)
        does: dict[str, Callable[[], dict[str, Any]]] = {
            "choose": told.choose,
            "steps": lambda what=what: told.take(what["steps"]),  # type: ignore[misc]
            "profile": lambda what=what: told.profile(what["steps"]),  # type: ignore[misc]
        }
        _say(_or_said(does[what["do"]]))


def _or_said(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return {"said": "".join(traceback.format_exception(error))[-1500:]}


def _say(what: dict[str, Any]) -> None:
    print(MARK + json.dumps(what), flush=True)


def main() -> None:
    root = Path(__file__).parent.parent
    sys.path[0] = str(root)  # in place of this file's folder
    sys.path.insert(1, str(root / "src"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("asked", type=Path, help="a JSON file of what is asked of it")
    arguments = parser.parse_args()
    serve(arguments.kind, json.loads(arguments.asked.read_text()))


if __name__ == "__main__":
    main()

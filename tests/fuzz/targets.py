"""Targets: each draws a file and gives it to the package, which accepts it or refuses it with a
message in three parts."""

from __future__ import annotations

import io
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from hypothesis import strategies as st

from tests import tiny
from tests.fuzz.strategies import mistaken, of_schema
from tightfit.errors import DoesNotFit, InputError
from tightfit.job import DataSpec, Job
from tightfit.machine import Machine
from tightfit.plan import Plan, read_pins

MODEL = tiny.LLAMA
VALID = {
    "model": MODEL,
    "data": {"synthetic": "tokens", "sequence_length": 16, "samples": 64},
    "train": {"batch": 4, "steps": 2, "learning_rate": 1e-3, "betas": [0.9, 0.95], "schedule": "cosine", "seed": 3},
    "allow": ["bf16", "offload"],
    "limits": {"memory": "24GiB"},
    "plan": {
        "precision": "bf16-mixed",
        "micro_batch": 2,
        "recompute": "every-2",
        "split": [1, 1],
        "offload": ["states"],
    },
}
LARGEST = 2_000_000  # of a model that is built: vocabulary x width, width x depth, ...
_numbers = itertools.count()


def accept(call: Callable[[], Any]) -> Any:
    """What `call` returns; None where it refuses as it should. Raises whatever else it raises."""
    try:
        return call()
    except (InputError, DoesNotFit) as error:
        refusal = error
    parts = (refusal.asked, refusal.found, refusal.fix) if isinstance(refusal, InputError) else (str(refusal),)
    assert all(part.strip() for part in parts)
    assert len(str(refusal)) < 6000
    assert "Traceback" not in str(refusal)
    return None


class Folder:
    """A place for drawn files, each under a name of its own: what is cached goes by names."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="tightfit-fuzz-"))

    def write(self, ending: str, content: bytes) -> Path:
        path = self.path / f"{next(_numbers)}{ending}"
        path.write_bytes(content)
        return path

    def empty(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()


FOLDER = Folder()


def _schema(noun: Any) -> dict[str, Any]:
    return noun.model_json_schema()


def as_file(content: Any) -> bytes:
    try:
        return yaml.safe_dump(content, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    except (yaml.YAMLError, UnicodeError):
        return repr(content).encode("utf-8", "replace")


def _job_fields() -> st.SearchStrategy[Any]:
    """A job: each section is that of the valid one, or one of the schema's."""
    schema = _schema(Job)
    known = schema["$defs"]
    sections = {
        "model": st.one_of(st.just(MODEL), of_schema(known["ModelSpec"], known), _config_keys()),
        "data": st.one_of(st.just(VALID["data"]), of_schema(known["DataSpec"], known)),
        "train": st.one_of(st.just(VALID["train"]), of_schema(known["Train"], known)),
        "limits": of_schema(known["Limits"], known),
        "allow": of_schema(schema["properties"]["allow"], known),
        "plan": of_schema(_schema(Plan)),
        "loss": of_schema(schema["properties"]["loss"], known),
    }
    needed = {name: sections.pop(name) for name in ("model", "data")}
    return st.fixed_dictionaries(needed, optional=sections)


def _config_keys() -> st.SearchStrategy[Any]:
    from tests.fuzz.strategies import WILD

    names = [
        *MODEL,
        "num_labels",
        "rope_parameters",
        "rope_scaling",
        "layer_types",
        "pad_token_id",
        "hidden_act",
        "head_dim",
        "config",
    ]
    others = st.sampled_from(["gpt2", "bert", "t5", "vit", "detr", "mixtral", "swin", "whisper"])
    return st.tuples(st.dictionaries(st.sampled_from(names), WILD, min_size=1, max_size=2), others, st.booleans()).map(
        lambda drawn: {**(MODEL if drawn[2] else {"architecture": drawn[1]}), **drawn[0]}
    )


def job_files() -> st.SearchStrategy[bytes]:
    return st.one_of(_job_fields().map(as_file), mistaken(as_file(VALID)), mistaken(json.dumps(VALID).encode()))


def take_job(content: bytes) -> None:
    path = FOLDER.write(".yaml", content)
    job = accept(lambda: Job.load(path))
    if job is None:
        return
    again = Job.parse(_read(job.to_yaml()))
    assert again == job
    accept(lambda: look_into(job))


def _read(text: str) -> Any:
    from tightfit.yaml_input import parse_yaml

    return parse_yaml(text)


def look_into(job: Job) -> None:
    """As a command would, as far as that is quick."""
    from tightfit.data import UserStream, model_input, open_samples
    from tightfit.models import model_config
    from tightfit.planner.defaults import complete

    config = model_config(job.model) if job.model.python is None else None
    model_input(job)
    if is_small(config) and job.model.from_ is None:
        if isinstance(job.plan, dict):
            complete(job, Machine.named("a100-80gb:4"), read_pins(job.plan))
        if isinstance(job.data, DataSpec) and is_quick(job.data):
            samples = open_samples(job)
            if not isinstance(samples, UserStream):
                few = np.arange(min(len(samples), 2))
                samples.batch(few, few * 0)


def is_small(config: Any) -> bool:
    """Whether every number of a config is one of a tiny model."""
    if config is None:
        return False
    content = config.to_dict()
    return all(not isinstance(value, int) or abs(value) <= 100_000 for value in content.values())


def is_quick(data: DataSpec) -> bool:
    """Whether it is little, or a path to nothing."""
    named = [data.text, data.jsonl, data.parquet, data.images, data.dataset, data.tokenizer]
    paths = [path for one in named if one is not None for path in ([one] if isinstance(one, str) else one)]
    nothing = all("*" not in path and (len(path) > 255 or not Path(path).exists()) for path in paths)
    return nothing and data.sequence_length <= 4096 and (data.image_size or 0) <= 256


def plan_files() -> st.SearchStrategy[bytes]:
    return st.one_of(of_schema(_schema(Plan)).map(as_file), mistaken(as_file(VALID["plan"])))


def take_plan(content: bytes) -> None:
    from tightfit.planner.defaults import complete

    path = FOLDER.write(".yaml", content)
    pins = accept(lambda: read_pins(path))
    if pins is not None:
        assert accept(lambda: Plan.parse(pins)) is not None
        assert read_pins(_write(Plan.parse(pins).to_yaml())) == Plan.parse(pins).model_dump()
        job = Job.parse({**VALID, "plan": None, "model": {"preset": "gpt2"}})
        accept(lambda: complete(job, Machine.named("h100-sxm:8"), pins))


def _write(text: str) -> Path:
    return FOLDER.write(".yaml", text.encode())


def changes() -> st.SearchStrategy[str]:
    keys = [
        "train.steps",
        "train.seed",
        "limits.memory",
        "model.config",
        "data",
        "",
        ".",
        "a..b",
        "plan.zero",
        "train.betas",
        "model.from",
    ]
    values = st.one_of(
        st.text(max_size=20), st.sampled_from(["9" * 400, "[" * 500, "1:30", "{a: 1", "*a", "&a [*a]", "\0", "'"])
    )
    return st.tuples(
        st.one_of(st.sampled_from(keys), st.text(max_size=8)), st.sampled_from(["=", "", "=="]), values
    ).map("".join)


def take_change(change: str) -> None:
    accept(lambda: Job.load(_write(as_file(VALID).decode()), [change]))


def machines() -> st.SearchStrategy[Any]:
    names = st.one_of(st.text(max_size=12), mistaken(b"h100-sxm:8x4").map(lambda name: name.decode("utf-8", "replace")))
    return st.one_of(names, of_schema(_schema(Machine)), mistaken(Machine.named("a100-80gb").to_json().encode()))


def take_machine(drawn: Any) -> None:
    from tightfit.report.machine import machine_rows, read_record

    if isinstance(drawn, str):
        machine = accept(lambda: Machine.named(drawn))
    elif isinstance(drawn, bytes):
        accept(lambda: read_record(FOLDER.write(".json", drawn)))
        machine = accept(lambda: Machine.parse(_read(drawn.decode("utf-8", "replace"))) if _is_yaml(drawn) else None)
    else:
        machine = accept(lambda: Machine.parse(drawn))
    if machine is not None:
        assert machine_rows(machine)
        assert repr(machine)


def _is_yaml(content: bytes) -> bool:
    try:
        _read(content.decode("utf-8", "replace"))
    except yaml.YAMLError:
        return False
    return True


ROWS = "\n".join(
    json.dumps({"text": f"some words {number} ü🙂\n" * 3, "label": number % 3, "more": [1, {}]}) for number in range(6)
)


def _parquet() -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": ["some words"] * 20, "label": [1] * 20}), file)
    return file.getvalue()


def data_files() -> st.SearchStrategy[tuple[str, bytes, bool]]:
    kinds = {"text": mistaken(ROWS.encode()), "jsonl": mistaken(ROWS.encode()), "parquet": mistaken(_parquet())}
    return st.sampled_from(sorted(kinds)).flatmap(lambda kind: st.tuples(st.just(kind), kinds[kind], st.booleans()))


def take_data(drawn: tuple[str, bytes, bool]) -> None:
    from tightfit.data.samples import DamagePolicy
    from tightfit.data.text import Columns, open_text

    kind, content, skip = drawn
    spec = DataSpec.parse({kind: str(FOLDER.write(f".{kind}", content))})
    for label in (None, "label") if kind != "text" else (None,):
        accept(partial(_read_all, open_text(spec, Columns("text", None, label)), DamagePolicy(skip)))


def _read_all(source: Any, damage: Any) -> None:
    for document in source.documents(damage):
        document.text.encode()


def take_samples(drawn: tuple[str, bytes, bool]) -> None:
    """The whole way to batches, with a tokenizer that is trained on what was drawn."""
    from tightfit.data import open_samples

    kind, content, skip = drawn
    fields = {kind: str(FOLDER.write(f".{kind}", content)), "skip_damaged": skip, "sequence_length": 8}
    job = Job.parse(
        {"model": {"architecture": "gpt2", "vocab_size": 280, "n_embd": 8, "n_head": 2, "n_layer": 1}, "data": fields}
    )
    samples = accept(lambda: open_samples(job))
    if samples is not None:
        accept(lambda: samples.batch(np.arange(len(samples)), np.zeros(len(samples), dtype=np.int64)))


def _image(kind: str) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.arange(192, dtype=np.uint8).reshape(8, 8, 3)).save(file, kind)
    return file.getvalue()


def images() -> st.SearchStrategy[tuple[str, bytes, bool]]:
    kinds = {kind: mistaken(_image(kind)) for kind in ("png", "jpeg", "bmp", "gif", "tiff", "ppm", "webp")}
    return st.sampled_from(sorted(kinds)).flatmap(lambda kind: st.tuples(st.just(kind), kinds[kind], st.booleans()))


def take_image(drawn: tuple[str, bytes, bool]) -> None:
    from tightfit.data import open_samples

    kind, content, skip = drawn
    folder = FOLDER.path / f"{next(_numbers)}"
    (folder / "class").mkdir(parents=True)
    (folder / "class" / f"one.{kind}").write_bytes(content)
    model = {"architecture": "vit", "image_size": 8, "patch_size": 4}
    job = Job.parse({"model": model, "data": {"images": str(folder), "skip_damaged": skip}})
    samples = accept(lambda: open_samples(job))
    if samples is not None:
        accept(lambda: samples.batch(np.array([0]), np.array([0])))


def _tokenizer() -> bytes:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"</s>": 0, "some": 1, "words": 2, "[UNK]": 3}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return words.to_str(pretty=True).encode()


def tokenizers() -> st.SearchStrategy[bytes]:
    return mistaken(_tokenizer())


def take_tokenizer(content: bytes) -> None:
    from tightfit.data import open_samples

    data = {
        "text": str(FOLDER.write(".txt", b"some words " * 20)),
        "tokenizer": str(FOLDER.write(".json", content)),
        "sequence_length": 4,
    }
    model = {"architecture": "gpt2", "vocab_size": 280, "n_embd": 8, "n_head": 2, "n_layer": 1}
    accept(lambda: open_samples(Job.parse({"model": model, "data": data})))


def _saved() -> dict[str, bytes]:
    import safetensors.torch
    import torch

    tensors = {"one": torch.ones(2), "two": torch.zeros(3)}
    index = {"metadata": {"total_size": 20}, "weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{name: MODEL[name] for name in MODEL if name != "architecture"},
    }
    return {
        "model-00001-of-00001.safetensors": safetensors.torch.save(tensors),
        "model.safetensors.index.json": json.dumps(index, indent=1).encode(),
        "config.json": json.dumps(config, indent=1).encode(),
    }


def folders() -> st.SearchStrategy[dict[str, bytes]]:
    """A folder of a pretrained model, one of its files with mistakes."""
    saved = _saved()
    return st.sampled_from(sorted(saved)).flatmap(
        lambda name: mistaken(saved[name]).map(lambda content: {**saved, name: content})
    )


def take_folder(files: dict[str, bytes]) -> None:
    from tightfit.data import model_input
    from tightfit.tensor_files import Reader

    folder = FOLDER.path / f"{next(_numbers)}"
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    accept(lambda: model_input(Job.parse({**VALID, "model": {"from": str(folder)}})))

    def read() -> None:
        with Reader(folder, "model") as reader:
            for name in reader.names:
                reader.get(name)

    with suppress(FileNotFoundError):  # which whoever resumes says in his own words
        accept(read)


TARGETS: dict[str, tuple[Callable[[], st.SearchStrategy[Any]], Callable[[Any], None], float]] = {
    "job": (job_files, take_job, 0.3),
    "plan": (plan_files, take_plan, 0.15),
    "change": (changes, take_change, 0.05),
    "machine": (machines, take_machine, 0.1),
    "data": (data_files, take_data, 0.2),
    "samples": (data_files, take_samples, 0.02),
    "image": (images, take_image, 0.05),
    "tokenizer": (tokenizers, take_tokenizer, 0.05),
    "folder": (folders, take_folder, 0.08),
}

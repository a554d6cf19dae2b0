"""Implements `tightfit export` and `tightfit generate`, which use the model of a run outside of its
training."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tightfit.data.image_processing import PROCESSOR_FILE
from tightfit.data.tokens import leading_tokens, plain_backend
from tightfit.engine.checkpoint.extra_state import KIND, restore_extra_states
from tightfit.engine.checkpoint.resume import check_files, known_checksums
from tightfit.engine.checkpoint.save import STATE, newest
from tightfit.errors import InputError
from tightfit.job import Job
from tightfit.models import is_transformers_model, model_factory, position_count
from tightfit.models.lora import has_adapters, merge_adapters, plain_model, save_adapters
from tightfit.tensor_files import Reader
from tightfit.values import read_yaml

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TrainedModel:
    """The model of a run on the CPU, with the weights of the newest checkpoint.

    model      the model, in the dtypes of the checkpoint
    tokenizer  the tokenizer of the run's data; None if the checkpoint has no tokenizer
    path       the folder of the checkpoint
    """

    model: nn.Module
    tokenizer: Any
    path: Path


def load_trained(run: Path) -> TrainedModel:
    """Load the model and the tokenizer from the newest checkpoint in a run's folder, `run`. The
    model is in evaluation mode, on the CPU.

    Raises InputError if the folder is not that of a run, if it has no checkpoint, if a file of the
    checkpoint is not as it was saved, or if the checkpoint does not fit the model.
    """
    if not (run / "job.yaml").exists():
        raise InputError(
            f"run {run}", "has no job.yaml", "name the folder that tightfit train wrote, such as runs/name"
        )
    job = Job.parse({**read_yaml(run / "job.yaml"), "plan": None})
    path = newest(run / "checkpoints")
    check_files(path, [name for name in known_checksums(path) if not name.startswith("optimizer")])
    model = model_factory(job.model)()
    with Reader(path, "model") as saved:
        _load(model, saved, path)
    if is_transformers_model(model):
        _name_classes(model, path)
    tokenizer = None
    if (path / "tokenizer_config.json").exists():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    return TrainedModel(model.eval(), tokenizer, path)


def _name_classes(model: Any, path: Path) -> None:
    """Give a classifier's config the names of the classes that the checkpoint `path` has."""
    names = json.loads((path / "config.json").read_text()).get("id2label")
    if names and len(names) == getattr(model.config, "num_labels", None):
        named = {int(number): name for number, name in names.items()}
        model.config.id2label, model.config.label2id = named, {name: number for number, name in named.items()}


@torch.no_grad()
def _load(model: nn.Module, saved: Reader, path: Path) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    missing = sorted({name for name, _ in model.named_parameters()} - saved.names)
    wrong = [name for name in sorted(saved.names & tensors.keys()) if saved.get(name).shape != tensors[name].shape]
    if missing or wrong:
        raise _does_not_fit(path, (missing or wrong)[0])
    for name in saved.names & tensors.keys():
        tensors[name].data = saved.get(name).clone()  # the file is mapped
    states = json.loads((path / STATE).read_text()).get(KIND, {})
    try:
        restore_extra_states(model, states, path, torch.device("cpu"))
    except RuntimeError as error:
        raise _does_not_fit(path, str(error)) from error


def _does_not_fit(path: Path, found: str) -> InputError:
    return InputError(
        f"checkpoint {path}",
        f"does not fit the model of job.yaml ({found})",
        "use the model's code from the time of the training",
    )


def export(run: Path, folder: Path, merge: bool = False, dtype: str | None = None) -> str:
    """Write a run's model into a new folder, in the format of transformers or, for adapters, of
    peft. Return a sentence that says what was written where.

    run    the run's folder; its newest checkpoint is exported
    merge  for a model with adapters: True adds the adapters to the weights and writes a plain
           transformers model; False writes the adapters alone
    dtype  fp32, bf16 or fp16; None: the dtype of the checkpoint

    Raises InputError if the folder has files, for an unknown dtype, for `merge` without adapters,
    and for a model that is not from transformers.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"--dtype {dtype}", "is not a type of weights", f"use one of: {', '.join(DTYPES)}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"--to {folder}", "exists and is not an empty folder", "name a new folder")
    trained = load_trained(run)
    adapted = has_adapters(trained.model)
    if merge and not adapted:
        raise InputError("--merge", "the run's model has no adapters", "leave out --merge")
    plain = plain_model(trained.model)
    if not is_transformers_model(plain):
        raise InputError(
            f"run {run}",
            f"its model is {type(plain).__name__}, and only models of transformers can be exported",
            f"read the weights from {trained.path}/model.safetensors",
        )
    folder.mkdir(parents=True, exist_ok=True)
    if adapted and not merge:
        state = {name: value if dtype is None else value.to(DTYPES[dtype]) for name, value in _state(trained.model)}
        save_adapters(trained.model, state, folder)
        what = "adapters"
    else:
        _save_plain(trained.model, dtype, folder)
        what = "merged model" if merge else "model"
    if trained.tokenizer is not None:
        trained.tokenizer.save_pretrained(folder)
        what += " and tokenizer"
    if (trained.path / PROCESSOR_FILE).exists():
        shutil.copyfile(trained.path / PROCESSOR_FILE, folder / PROCESSOR_FILE)
        what += " and image processor"
    return f"{what} of {trained.path} written to {folder}"


def _state(model: nn.Module) -> list[tuple[str, Any]]:
    return list(model.state_dict().items())


def _save_plain(model: nn.Module, dtype: str | None, folder: Path) -> None:
    """Write a transformers model into `folder`. Adapters are first added to the weights, in fp32.

    dtype  fp32, bf16 or fp16; None: the dtype of the largest parameter
    """
    kept = DTYPES[dtype] if dtype else _largest_type(model)
    plain: Any = merge_adapters(model.float()) if has_adapters(model) else model
    plain = plain.to(kept)
    if getattr(plain.config, "use_cache", None) is False:
        plain.config.use_cache = True  # generation needs it, training does not
    plain.save_pretrained(folder)


def _largest_type(model: nn.Module) -> torch.dtype:
    """Return the dtype of the floating-point parameter with the most elements."""
    floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    return max(floating, key=lambda parameter: parameter.numel()).dtype


def export_command(run: Path, folder: Path, merge: bool, dtype: str | None) -> None:
    _quiet()
    print(export(run, folder, merge, dtype))


def generate(
    run: Path, prompt: str, tokens: int = 100, temperature: float = 0.0, chat: bool = False, seed: int = 0
) -> str:
    """Return the text with which a run's model continues a prompt.

    run          the run's folder; its newest checkpoint is used
    tokens       the largest number of new tokens
    temperature  0 takes the most likely token each time; larger values draw more varied tokens
    chat         whether to put the prompt into the tokenizer's chat template, as a message of the
                 user
    seed         seed for drawing tokens

    Raises InputError for a run without a tokenizer, for a model that does not generate text, for
    `chat` if the tokenizer has no chat template, for a prompt without tokens, and for more tokens than
    the model has positions.
    """
    trained = load_trained(run)
    model: Any = merge_adapters(trained.model.float()) if has_adapters(trained.model) else trained.model
    if trained.tokenizer is None:
        raise InputError(f"run {run}", "its data is not text, so there is no tokenizer", "generate from a run on text")
    if not is_transformers_model(model) or not model.can_generate():
        raise InputError(
            f"run {run}",
            f"{type(model).__name__} does not generate text",
            "use a causal-lm or seq2seq-lm of transformers",
        )
    if chat and not trained.tokenizer.chat_template:
        raise InputError("--chat", "the run's tokenizer has no chat template", "leave out --chat")
    if chat:
        said = [{"role": "user", "content": prompt}]
        prompt = trained.tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    inputs = _prompt_tokens(trained.tokenizer, prompt, chat, model.config.is_encoder_decoder)
    _check_length(model.config, inputs["input_ids"].shape[1], tokens)
    torch.manual_seed(seed)
    drawn = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    end = trained.tokenizer.eos_token_id
    model.config.use_cache = True
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=tokens, eos_token_id=end, pad_token_id=end, **drawn)[0]
    new = made if model.config.is_encoder_decoder else made[inputs["input_ids"].shape[1] :]
    text: str = trained.tokenizer.decode(new, skip_special_tokens=True)
    return text


def _check_length(config: Any, given: int, new: int) -> None:
    """Raise InputError if a prompt of `given` tokens is empty, or too long to be continued by `new`."""
    if given == 0:
        raise InputError("the prompt", "has no tokens", "give some text to continue")
    positions = position_count(config)
    longest = max(given, new) if config.is_encoder_decoder else given + new
    if positions is not None and longest > positions:
        room = positions - (0 if config.is_encoder_decoder else given)
        raise InputError(
            f"--tokens {new}",
            f"the model has {positions} positions, and the prompt takes {given}",
            f"use --tokens {room}" if room > 0 and given <= positions else "use a shorter prompt",
        )


def _prompt_tokens(tokenizer: Any, prompt: str, chat: bool, whole: bool) -> dict[str, torch.Tensor]:
    """Return a prompt's input_ids and attention_mask, both (1, L).

    chat   whether a chat template wrote the prompt, with its own special tokens
    whole  whether the model reads the prompt as a whole text, as an encoder does. Else it continues
           the prompt, which then has no special tokens at its end
    """
    if whole and not chat:
        ids = tokenizer(prompt)["input_ids"]
    else:
        backend = plain_backend(tokenizer)
        ids = [*([] if chat else leading_tokens(backend)), *backend.encode(prompt, add_special_tokens=False).ids]
    return {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}


def generate_command(run: Path, prompt: str, tokens: int, temperature: float, chat: bool) -> None:
    _quiet()
    text = generate(run, prompt, tokens, temperature, chat)
    print(text)
    if not text.strip():
        print("the model ended the text at once", file=sys.stderr)


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

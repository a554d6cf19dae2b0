"""Writes docs/import.md from the importers' tables: python -m tightfit.report.import_docs.

A test checks that the page agrees with the tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from tightfit.importers.importing import IMPORTERS
from tightfit.importers.mapping import Importer, Key

HEAD = """# Importing another tool's configuration

Written by `python -m tightfit.report.import_docs` from the tables in `src/tightfit/importers`.

```sh
tightfit import ds_config.json                      # imported/ds_config/job.yaml and plan.yaml
tightfit import config.yaml --from axolotl --out my-job --devices 8
```

`tightfit import FILE` reads the file, recognizes the tool by the file's keys, and writes a job file and a plan file. It prints
every key of the file with its outcome:

| outcome | meaning |
| --- | --- |
| a field | the key sets this field of the job or the plan to this value |
| the tool's default | the file does not have the key, but the tool's default changes the mathematics, so it is written |
| left open | the file does not decide the field: its value is auto, or the batch lacks a factor |
| contradiction | two keys contradict each other; the field is left out |
| no counterpart | tightfit cannot do what the key asks for, so the training is not the same without it |
| not needed | the training is the same without the key |
| unknown | tightfit does not know such a key of this tool |

Then it lists the contradictions, including those with tightfit's own rules, the keys without counterpart, and what you have to do:
add a model or data that the file does not have, name a template that only the tool has, replace epochs by steps. job.yaml has the
same lists as comments.

A file that asks for another objective is refused (exit code 2): training on preferences or rewards (DPO, KTO, ORPO, PPO, GRPO,
reward models) and distillation. A supervised job with the same keys would be another training.

**The batch.** `train.batch` is the number of samples of one optimizer step on all devices, and `plan.micro_batch` the number of
samples of one forward on each data rank: batch = micro-batch x accumulation steps x data ranks. The number of data ranks is
devices / (tp x pp x cp). If the file does not say how many devices there are, it is imported for one device; `--devices N` sets
their number.

**Adapters.** `adapter: lora`, `finetuning_type: lora`, `use_peft: true` and torchtune's builders with `lora` in their names become
`model.lora`, with the tool's defaults of rank, alpha, dropout and targets. Weights in 4 bits (nf4) become `model.lora.quantize`.
Rank-stabilized LoRA is an alpha of alpha x sqrt(rank), and LoRA+ a learning rate of its own for the matrices B (`train.groups`).

**Prompts and chats.** Data sets of prompts, instructions and conversations become `data.format` with `data.fields`, the tool's mask
becomes `data.loss_on`, and its packing `data.packing`: separate if the samples of a sequence do not attend to one another. A chat
template whose text is in the file is written beside the job. Templates that only the tool has must be named in `data.chat_template`.
Several data sets become `data.sources`.

**The permissions.** `allow` contains what the file asks for: a file with `bf16: true` allows bf16, a file in fp32 allows nothing.
"""


def page(importers: Iterable[Importer] = IMPORTERS) -> str:
    """Return the text of docs/import.md."""
    return HEAD + "".join(
        _section(importer) for importer in sorted(importers, key=lambda importer: importer.title.lower())
    )


def _section(importer: Importer) -> str:
    lines = [
        f"\n## {importer.title}\n",
        f"`--from {importer.name}`. Recognized by: {', '.join(f'`{mark}`' for mark in importer.marks)}.",
        f"auto: {_sentence(importer.auto)}.",
    ]
    if importer.defaults:
        defaults = ", ".join(f"`{name}: {str(value).lower()}`" for name, value in importer.defaults.items())
        lines.append(f"Defaults: {defaults}.")
    if importer.sections:
        lines.append(
            f"The keys may also be in a section: {', '.join(f'`{section}`' for section in importer.sections)}."
        )
    shared = _shared(importer)
    if shared:
        lines.append(f"It also takes the keys of {shared.title}, which are listed there.")
    lines += ["", "| key | tightfit | how, or why not |", "| --- | --- | --- |"]
    for (field, words), keys in groupby(shown_keys(importer), key=lambda key: (_field(key), _words(key))):
        names = ", ".join(f"`{key.name}`" for key in keys)
        lines.append(f"| {names} | {field} | {words} |")
    return "\n".join(lines) + "\n"


def _shared(importer: Importer) -> Importer | None:
    """Return the importer with a smaller table whose keys are mostly in this importer's table, too;
    None if there is none."""
    own = {id(key) for key in importer.keys}
    smaller = (one for one in IMPORTERS if len(one.keys) < len(importer.keys))
    return next((one for one in smaller if sum(id(key) in own for key in one.keys) > len(one.keys) / 2), None)


def shown_keys(importer: Importer) -> list[Key]:
    """Return the keys that the importer's section of the page lists. Left out are keys that another
    importer's section already lists, and keys of a DeepSpeed file inside another tool's file."""
    shared = _shared(importer)
    known = {id(key) for key in shared.keys} if shared else set()
    inside = ("deepspeed.", "deepspeed_config.deepspeed_config_file.")
    return [
        key
        for key in importer.keys
        if id(key) not in known and (importer.name == "deepspeed" or not key.name.startswith(inside))
    ]


def _field(key: Key) -> str:
    if key.field:
        return f"`{key.field}`"
    return "by value" if key.convert else "no counterpart" if key.is_lost else "not needed"


def _words(key: Key) -> str:
    words = key.reason or (key.convert.__doc__ if key.convert else "") or ""
    return _sentence(_for_users(" ".join(words.split()))).replace("|", "\\|")


def _for_users(words: str) -> str:
    """Return the text of a docstring without what only the code's reader needs: "Return the value as
    a whole number" becomes "a whole number"."""
    for name in (
        " (Lacks, with the reason)",
        "Lacks, with the reason: ",
        " (ValueError)",
        ", as an OptimizerChoice,",
        ", as a ScheduleChoice,",
        "Return the value as ",
        "Return the value ",
        "Return ",
    ):
        words = words.replace(name, "")
    return words


def _sentence(words: str) -> str:
    return words.rstrip(".")


if __name__ == "__main__":
    (Path(__file__).parents[3] / "docs" / "import.md").write_text(page())

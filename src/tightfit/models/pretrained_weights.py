"""Read the weights of a pretrained model, and give a classifier a new last layer if the job sets
another number of classes.

Keys of `model.config` may change the shapes of a pretrained model's tensors. Only the tensors of a
classifier's last layer (its head) may differ from the weights in the folder, and only if the job
sets `num_labels` or `id2label`: they get new, random values. Every other difference raises InputError.

A folder may lack the weights of a head, such as those of a classifier that begins with a masked language
model, or of a pooler. It may not lack others: they would be random.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tightfit.errors import InputError, TightfitWarning
from tightfit.job import ModelSpec

if TYPE_CHECKING:
    from torch import nn

Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]  # tensor -> (its shape in the folder, in the model)
_MOST_NAMED = 3  # tensors that a message names


def check_sizes(spec: ModelSpec, kind: Any, own: Any, config: Any) -> None:
    """Raise InputError if the keys of `spec.config` change the shape of a pretrained tensor that is
    not part of a classifier's head. This reads no weights.

    kind    the transformers AutoModel class
    own     the config in the pretrained folder
    config  the config with the keys of `spec.config`
    """
    import torch

    from tightfit._torch.fake import unset_fake_temporarily
    from tightfit.models.caches import isolated_model_caches

    with isolated_model_caches(on_meta=True), unset_fake_temporarily(), torch.device("meta"):
        before, after = (kind.from_config(one, dtype=torch.float32) for one in (own, config))
        old, new = (_shapes(model) for model in (before, after))
    changed = {name: (old[name], new[name]) for name in old.keys() & new.keys() if old[name] != new[name]}
    wrong = _without_head(spec, after, changed)
    if wrong:
        raise InputError(
            f"job: model.config: {', '.join(spec.config)}",
            f"changes the pretrained model, whose weights do not fit: {_described(wrong)}",
            "leave these keys out; or use model: {architecture: ...}, which starts from random weights; for more tokens, "
            "call resize_token_embeddings of transformers once, and save the model to a new folder",
        )


def read_weights(spec: ModelSpec, kind: Any, config: Any, folder: Path) -> nn.Module:
    """Return the pretrained model of a folder, in fp32 on the CPU.

    kind    the transformers AutoModel class
    config  the model's config

    Raises InputError if a tensor of the folder has another shape than the config gives it, and is not
    part of a classifier's head of which the job sets the number of classes; and if the folder lacks weights
    of the base model. Warns if it lacks those of a head that the job does not ask for.
    """
    import torch

    model, facts = kind.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        local_files_only=True,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    found = {name: (tuple(old), tuple(new)) for name, old, new in facts["mismatched_keys"]}
    wrong = _without_head(spec, model, found)
    if wrong:
        raise InputError(
            f"job: model.from={folder}",
            f"its weights do not fit its config.json: {_described(wrong)}",
            "correct its config.json, or name a folder that transformers' save_pretrained wrote; a classifier gets another "
            "number of classes by model.config: {num_labels: 10}",
        )
    _check_missing(spec, model, sorted(facts["missing_keys"]), sorted(facts["unexpected_keys"]), folder)
    return model


def _check_missing(spec: ModelSpec, model: Any, missing: list[str], unused: list[str], folder: Path) -> None:
    """Raise InputError if `missing` names weights of the base model, and warn of others that start from random
    values, unless they are the head for the classes that the job sets.

    missing, unused  names of the model's tensors that the folder lacks, and of the folder's that the model lacks
    """
    if not missing:
        return
    inside = f"{model.base_model_prefix}."
    has_base = hasattr(model, model.base_model_prefix)
    outputs = model.get_output_embeddings()
    of_output = {id(parameter) for parameter in outputs.parameters()} if outputs is not None else set()
    head = {name for name, parameter in model.named_parameters() if id(parameter) in of_output}
    wrong = [
        name
        for name in missing
        if name not in head and (name.startswith(inside) or not has_base) and "pooler" not in name
    ]
    if wrong:
        others = f", but has {_named(unused)}, which the model has not" if unused else ""
        raise InputError(
            f"job: model.from={folder}",
            f"has no weights for {_named(wrong)}{others}",
            "name a folder with all weights of the model that its config.json describes, such as save_pretrained writes",
        )
    if {"num_labels", "id2label"} & set(spec.config) and not head & set(missing):
        return
    warnings.warn(
        f"model.from={folder}: has no weights for {_named(missing)}, which start from random values",
        TightfitWarning,
        stacklevel=2,
    )


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _without_head(spec: ModelSpec, model: Any, shapes: Shapes) -> Shapes:
    """Return the tensors that are not part of a classifier's head for the classes that the job sets
    by `num_labels` or `id2label`. A head has one row for each class and is outside of the base model."""
    if not {"num_labels", "id2label"} & set(spec.config):
        return shapes
    inside, labels = f"{model.base_model_prefix}.", model.config.num_labels
    return {
        name: (old, new)
        for name, (old, new) in shapes.items()
        if name.startswith(inside) or new[:1] != (labels,) or old[1:] != new[1:]
    }


def _described(shapes: Shapes) -> str:
    named = [f"{name} has {list(old)} there and {list(new)} here" for name, (old, new) in sorted(shapes.items())]
    more = f", and {len(named) - _MOST_NAMED} more" if len(named) > _MOST_NAMED else ""
    return ", ".join(named[:_MOST_NAMED]) + more


__all__ = ["check_sizes", "read_weights"]

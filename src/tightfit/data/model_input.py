"""Find out what inputs the model of a job takes, from its transformers config and, if it is
pretrained, from the files in its folder."""

from __future__ import annotations

import warnings
from typing import Any

from tightfit.data.image_processing import MODES, pretrained_processing
from tightfit.data.samples import ModelInput
from tightfit.errors import InputError, TightfitWarning
from tightfit.job import Job, ModelSpec
from tightfit.models import model_config, position_count, task_of, text_config
from tightfit.models.pretrained import own_tokenizer, pretrained_folder, read_config
from tightfit.models.tasks import classes_of, config_of_function, is_token_classifier, task_of_class


def model_input(job: Job) -> ModelInput:
    """Return what inputs a job's model takes (task, vocabulary size, image size, ...), read from
    the model's transformers config. Fields that the config does not have are None, and so are all
    config fields of a model from the user's own code.

    The image size of a pretrained model is that of the image processor in its folder, if there is
    one. Raises InputError for a classifier whose config asks for a regression, or for several labels.
    """
    config = model_config(job.model) if isinstance(job.model, ModelSpec) else None
    text, task = text_config(config), task_of(job.model)
    if task == "classification" and job.loss is None:
        _check_problem(job.model, config)
    if task is not None and job.loss is None:
        _check_loss(job.model, config)
    size, channels = getattr(config, "image_size", None), getattr(config, "num_channels", None)
    if isinstance(job.model, ModelSpec) and job.model.from_ and isinstance(size, int) and channels in MODES:
        processing = pretrained_processing(pretrained_folder(job.model.from_), channels)
        size = size if processing is None else processing.size
    return ModelInput(
        task=task,
        own_loss=job.loss is not None,
        is_token_classifier=task is None and is_token_classifier(job.model),
        vocabulary=getattr(text, "vocab_size", None),
        positions=position_count(config),
        labels=getattr(config, "num_labels", None),
        image_size=size if isinstance(size, int) else None,
        channels=channels,
        tokenizer=_own_tokenizer(job.model),
        pretrained=job.model.from_ if isinstance(job.model, ModelSpec) else None,
        class_names=_pretrained_classes(job.model, config) if task == "classification" else (),
    )


def _check_problem(model: Any, config: Any) -> None:
    """Raise InputError if the config of a classifier asks for a loss that is no cross entropy over
    classes.

    config: the transformers config; None for a model of the user's own function that names its task
    """
    if config is None and not (isinstance(model, ModelSpec) and model.task):
        config = config_of_function(model)
    problem = getattr(config, "problem_type", None)
    if getattr(config, "num_labels", None) == 1:
        problem = "regression"
    losses = {"regression": "MSELoss", "multi_label_classification": "BCEWithLogitsLoss"}
    if problem not in losses:
        return
    found = "has a single label, which transformers trains as a regression" if config.num_labels == 1 else ""
    choice = (
        "set num_labels to the number of classes"
        if config.num_labels == 1
        else "if each sample has one class, set problem_type: single_label_classification"
    )
    where = " (in model.config)" if isinstance(model, ModelSpec) and model.from_ else ""
    raise InputError(
        f"job: model: {model}" if isinstance(model, ModelSpec) else "model",
        f"{found or f'its config has problem_type: {problem}'}, and the task classification trains a cross entropy over classes",
        f"{choice}{where}; or give the job a loss, such as loss: {{python: 'torch.nn:{losses[problem]}'}}, and a dataset with "
        "such labels (data.python)",
    )


# classes of transformers that compute another loss than the cross entropy of their task -> what it is
_OTHER_LOSSES = {
    "ProphetNetForConditionalGeneration": "the loss of its class also predicts the tokens after the next one",
    "ProphetNetForCausalLM": "the loss of its class also predicts the tokens after the next one",
    "Pix2StructForConditionalGeneration": "its class hides from the decoder what is padding among the labels",
    "LukeForMaskedLM": "the loss of its class also predicts entities",
}


def _check_loss(model: Any, config: Any) -> None:
    """Raise InputError for a model of transformers whose class computes another loss than the cross entropy
    of its task. A job that names the task trains this cross entropy, unless keys of the config ask for more.

    config: the transformers config; None for a model of the user's own function
    """
    task = model.task if isinstance(model, ModelSpec) else None
    if config is None and task is None:
        config = config_of_function(model)
    names = () if task else classes_of(model)
    found = next((_OTHER_LOSSES[name] for name in names if name in _OTHER_LOSSES), None)
    fix = "name the task (model.task) to train it, or "
    for key, what in (("output_router_logits", "of the routers"), ("z_loss_coefficient", "of the logits' size")):
        if getattr(config, key, None):
            found, fix = f"with the key {key}, its class adds a loss {what}", f"leave out {key}, or "
    if found is not None:
        raise InputError(
            f"job: model: {model}" if isinstance(model, ModelSpec) else "model",
            f"{found}; without a loss, a job trains the cross entropy alone",
            f"{fix}give the job a loss of your own (loss: {{python: 'file.py:function'}})",
        )


def _pretrained_classes(model: Any, config: Any) -> tuple[str, ...]:
    """Return the names of a pretrained classifier's classes, by their numbers. Empty for names such
    as LABEL_0, which transformers gives to classes without names, and for a new last layer. Issues a
    TightfitWarning if the job gives the classifier a new last layer."""
    if not isinstance(model, ModelSpec) or not model.from_ or config is None:
        return ()
    names = getattr(config, "id2label", None) or {}
    content = read_config(model.from_)
    had = len(content.get("id2label") or ()) or content.get("num_labels") or 2
    is_classifier = any(task_of_class(str(name)) == "classification" for name in content.get("architectures") or ())
    if is_classifier and had != config.num_labels:
        warnings.warn(
            f"model.from={model.from_}: its classifier has {had} classes, and the job sets {config.num_labels}: its last layer "
            "is replaced by a new one with random weights",
            TightfitWarning,
            stacklevel=1,
        )
        return ()
    listed = tuple(str(names[number]) for number in sorted(names))
    return () if all(name == f"LABEL_{number}" for number, name in enumerate(listed)) else listed


def _own_tokenizer(model: Any) -> str | None:
    folder = own_tokenizer(model.from_) if isinstance(model, ModelSpec) and model.from_ else None
    return str(folder) if folder else None


__all__ = ["model_input"]

"""Switches the dropout of a model off, so that two runs of it compute the same."""

from __future__ import annotations

from torch import nn

from tightfit._torch.modules import Dropout


def switch_off_dropout(model: nn.Module) -> None:
    """Set to 0 the dropout probabilities of all modules of `model`: `p` of torch's dropout layers,
    and each attribute that is a float and has "drop" in its name, such as `attention_dropout`,
    `drop_prob` or `layerdrop`. Modules read these attributes in their forward. A model that draws
    random numbers in another way keeps doing so."""
    for module in model.modules():
        if isinstance(module, Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and "drop" in name.lower():
                setattr(module, name, 0.0)


__all__ = ["switch_off_dropout"]

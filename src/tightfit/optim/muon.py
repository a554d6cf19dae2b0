"""Muon for the hidden matrices and AdamW for all other parameters, as one optimizer with one
state_dict.

Source  Jordan et al. 2024, kellerjordan.github.io/posts/muon. The step is scaled to the size of
        AdamW's, so that both use the same learning rate: Liu et al. 2025, Muon is Scalable for LLM
        Training, arXiv:2502.16982.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from tightfit.models import find_blocks
from tightfit.optim.one_by_one import Closure, loss_of


class MuonWithAdamW(Optimizer):
    """Combines a torch Muon and a torch AdamW into one optimizer, which updates the parameters of
    both.

    The key `algorithm` of a parameter group ("muon" or "adamw") names the optimizer that updates
    the group.
    """

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self._parts: dict[str, Optimizer] = {"muon": muon, "adamw": adamw}
        super().__init__(
            [{**group, "algorithm": name} for name, part in self._parts.items() for group in part.param_groups], {}
        )

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        closure  computes the loss again and returns it, as in torch

        Returns the closure's loss, or None without a closure.
        """
        loss = loss_of(closure)
        for name, part in self._parts.items():
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()
        return loss


def head_of(model: nn.Module, blocks: str | None = None) -> frozenset[str]:
    """Return the names of the parameters of the output head: of what `get_output_embeddings` of a
    transformers model returns, else of the last nn.Linear, unless it is part of a repeated block.

    model   the whole model, before a plan divides it
    blocks  name of the list that holds the blocks, from the job; None to find it
    """
    head = None
    if callable(of_transformers := getattr(model, "get_output_embeddings", None)):
        head = of_transformers()
    if head is None:
        inner = {module for _, block in find_blocks(model, blocks) for module in block.modules()}
        linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
        head = linears[-1] if linears and linears[-1] not in inner else None
    own = set(head.parameters()) if isinstance(head, nn.Module) else set()
    return frozenset(name for name, parameter in model.named_parameters() if parameter in own)


def hidden_matrices(model: nn.Module, head: frozenset[str]) -> list[nn.Parameter]:
    """Return the model's trainable 2-D weights, except those of embeddings and of the output head.

    head  the names of the head's parameters, which `head_of` returned for the whole model
    """
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    outer = {parameter for table in tables for parameter in table.parameters()}
    return [
        parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.dim() == 2 and parameter not in outer and name not in head
    ]

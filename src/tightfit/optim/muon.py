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


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the model's trainable 2-D weights, except those of embeddings and of the last
    nn.Linear, which is assumed to be the output head."""
    modules = list(model.modules())
    outer = {p for module in modules if isinstance(module, nn.Embedding | nn.EmbeddingBag) for p in module.parameters()}
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    if linears:
        outer.update(linears[-1].parameters())
    return [p for p in model.parameters() if p.requires_grad and p.dim() == 2 and p not in outer]

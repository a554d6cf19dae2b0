"""Hooks on the gradients of parameters.

Plans that split a batch call a hook with the gradient of each part, and add up what it returns. That sum is what
it returns for the whole batch only if the hook is linear. One that scales or masks is linear. One that clips,
normalises or draws numbers is not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tightfit._torch.tensors import after_gradient_hooks, has_accumulation_hooks, has_backward_hooks

TOLERANCE = 1e-3  # of the norm of a gradient
SIZES = (1e-3, 1.0, 1e3)  # of the random numbers: a hook may clip large gradients only, or drop small ones


def nonlinear_hook(model: nn.Module) -> str:
    """Return the name of a parameter of the model with hooks on its gradient that are not linear; "" if there
    is none. Hooks that fail are passed.

    Calls the hooks several times, with random numbers of different sizes as gradients.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (has_backward_hooks(parameter) or has_accumulation_hooks(parameter)):
            try:
                if not all(_are_linear(parameter, size) for size in SIZES):
                    return name
            except Exception:  # whatever the user's code raises: it does so in backward, too
                continue
    return ""


def _are_linear(parameter: Tensor, size: float) -> bool:
    generator = torch.Generator(parameter.device).manual_seed(0)
    first, second = (
        size * torch.randn(parameter.shape, generator=generator, device=parameter.device).to(parameter.dtype)
        for _ in range(2)
    )
    total = after_gradient_hooks(parameter, first + second)
    parts = after_gradient_hooks(parameter, first) + after_gradient_hooks(parameter, second)
    norm = torch.linalg.vector_norm(total.float()) + torch.linalg.vector_norm(parts.float())
    limit = max(TOLERANCE, 4 * torch.finfo(parameter.dtype).eps)
    return bool(torch.linalg.vector_norm((total - parts).float()) <= limit * norm)

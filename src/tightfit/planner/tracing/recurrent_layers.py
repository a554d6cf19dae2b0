"""The kernels of recurrent layers (nn.LSTM, nn.GRU, nn.RNN) on fake tensors.

On a CPU, an LSTM layer is one kernel of oneDNN, and other layers are a few operations a time step. On a GPU, all
layers are one kernel of cuDNN. Such a kernel keeps a workspace for backward, whose size torch's fake
kernels do not know:

- oneDNN's is measured: the kernel runs on small tensors, and the size is extrapolated. It is linear in
  the samples, and in samples x time steps.
- cuDNN's is estimated from what backward needs: for each time step the gates, the cell, and the output of
  a layer below others. cuDNN may keep more.

Source  Appleyard et al. 2016, arXiv:1604.01946 (recurrent layers in cuDNN)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tightfit._torch.fake import unset_fake_temporarily
from tightfit._torch.operations import CUDNN_RNN, CUDNN_RNN_BACKWARD, MKLDNN_RNN, MKLDNN_RNN_BACKWARD

RNN_RELU, RNN_TANH, LSTM, GRU = range(4)  # torch's numbers of the kinds of layers
GATES = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 4, GRU: 3}
# values of the hidden size that cuDNN keeps for backward, for each sample, time step and layer: the gates;
# for LSTM the cell; for GRU the part of the candidate that the reset gate multiplies
KEPT = {RNN_RELU: 1, RNN_TANH: 1, LSTM: 5, GRU: 4}
EXACT = 1 << 20  # up to this many samples x time steps x hidden size, the workspace is that of a run of its own
FEW = 16  # samples and time steps of the smallest run for other sizes


def recurrent_output(func: Any, args: Any) -> Any:
    """Return the outputs of a recurrent kernel on fake tensors, or None if `func` is another operation.

    args  the arguments with which the operation is called
    """
    if func is MKLDNN_RNN.default:
        return _mkldnn_output(func, args)
    if func is CUDNN_RNN.default:
        return _cudnn_output(*args)
    if func is CUDNN_RNN_BACKWARD.default:
        return _cudnn_gradients(*args)
    return None


def _mkldnn_output(func: Any, args: Any) -> Any:
    output, hidden, cell, _ = func(*args)
    steps, samples, width = args[0].shape
    keeps, has_biases, size = args[15] and torch.is_grad_enabled(), args[12], int(args[10])
    if not keeps:
        return output, hidden, cell, output.new_empty(0, dtype=torch.uint8)
    count = _workspace_bytes(steps, samples, width, size, args[0].dtype, has_biases)
    return output, hidden, cell, output.new_empty(count, dtype=torch.uint8)


def _workspace_bytes(steps: int, samples: int, width: int, hidden: int, dtype: torch.dtype, has_biases: bool) -> int:
    """Return the bytes that oneDNN's LSTM layer keeps for backward.

    steps, samples, width  shape of the input
    hidden                 the hidden size
    """

    def measured(steps: int, samples: int) -> int:
        return _measured_workspace(steps, samples, width, hidden, dtype, has_biases)

    if steps * samples * hidden <= EXACT:
        return measured(steps, samples)
    small, longer, wider = measured(FEW, FEW), measured(2 * FEW, FEW), measured(FEW, 2 * FEW)
    each = (longer - small) / FEW**2  # of a sample and time step
    of_sample = (wider - small) / FEW - FEW * each
    constant = small - FEW * (of_sample + FEW * each)
    return round(constant + samples * (of_sample + steps * each))


@cache
def _measured_workspace(steps: int, samples: int, width: int, hidden: int, dtype: torch.dtype, has_biases: bool) -> int:
    with unset_fake_temporarily(), torch.enable_grad():  # without gradients, there is no workspace

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device="cpu")

        gates = GATES[LSTM] * hidden
        weights = zeros(gates, width), zeros(gates, hidden), zeros(gates), zeros(gates)
        states = zeros(samples, hidden), zeros(samples, hidden)
        flags: tuple[Any, ...] = (False, [], LSTM, hidden, 1, has_biases, False, False, True)
        made = MKLDNN_RNN.default(zeros(steps, samples, width), *weights, *states, *flags)
        return made[3].numel() * made[3].element_size()


def _cudnn_output(
    inputs: Tensor,
    weights: Sequence[Tensor],
    weight_count: int,
    buffer: Tensor | None,
    hidden: Tensor,
    cell: Tensor | None,
    kind: int,
    hidden_size: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *unused: Any,
) -> tuple[Tensor, ...]:
    directions, each = 1 + bool(bidirectional), projected or hidden_size
    steps, samples = inputs.shape[:2] if not batch_first else (inputs.shape[1], inputs.shape[0])
    shape = (samples, steps) if batch_first else (steps, samples)
    output = inputs.new_empty((*shape, directions * each))
    states = (layers * directions, samples)
    kept = layers * directions * KEPT[kind] * hidden_size + (layers - 1) * directions * each * (1 + (dropout > 0))
    reserve = kept * steps * samples * inputs.element_size() if train else 0
    return (
        output,
        inputs.new_empty((*states, each)),
        inputs.new_empty((*states, hidden_size) if kind == LSTM else 0),
        inputs.new_empty(reserve, dtype=torch.uint8),
        inputs.new_empty(0),
    )


def _cudnn_gradients(
    inputs: Tensor,
    weights: Sequence[Tensor],
    weight_count: int,
    buffer: Tensor,
    hidden: Tensor,
    cell: Tensor | None,
    *rest: Any,
) -> tuple[Any, ...]:
    wanted = rest[-1]
    return (
        torch.empty_like(inputs) if wanted[0] else None,
        torch.empty_like(hidden) if wanted[1] else None,
        torch.empty_like(cell) if wanted[2] and cell is not None else None,
        [torch.empty_like(weight) for weight in weights] if wanted[3] else [],
    )


def on_cudnn(kind: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return a kernel for torch's recurrent layers of a kind (such as aten.lstm.input) that calls cuDNN's
    kernel, as torch does on a GPU."""

    def run(
        operation: Any,
        inputs: Tensor,
        states: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> tuple[Tensor, ...]:
        hidden, cell = states if kind == LSTM else (states, None)
        directions = 1 + bool(bidirectional)
        count = len(weights) // (layers * directions)
        size = weights[1].shape[0] // GATES[kind]
        projected = hidden.shape[-1] if hidden.shape[-1] != size else 0
        shared: tuple[Any, ...] = (
            kind,
            size,
            projected,
            layers,
            batch_first,
            dropout,
            train,
            bool(bidirectional),
            [],
            None,
        )
        found = CUDNN_RNN.default(inputs, list(weights), count, None, hidden, cell, *shared)
        return found[:3] if kind == LSTM else found[:2]

    return run


def recurrent_sizes(name: str, args: Any) -> tuple[float, ...]:
    """Return (calls, rows, columns, depth) of a recurrent kernel: the number of its matrix products of
    (rows, depth) x (depth, columns), one after the other. Each computes all gates of a layer in a time
    step. Backward has two such products for each of them.

    name  the operation's name
    args  its arguments
    """
    inputs = args[0]
    if name in (_name(MKLDNN_RNN), _name(MKLDNN_RNN_BACKWARD)):
        gates, hidden = args[2].shape
        return inputs.shape[0], inputs.shape[1], gates, inputs.shape[2] + hidden
    weights, hidden, backward = args[1], args[4], name == _name(CUDNN_RNN_BACKWARD)
    batch_first, bidirectional = (args[14], args[17]) if backward else (args[10], args[13])
    layers = args[13] if backward else args[9]
    steps, samples = (inputs.shape[1], inputs.shape[0]) if batch_first else inputs.shape[:2]
    cells = layers * (1 + bool(bidirectional))
    count = len(weights) // cells
    gates = weights[1].shape[0]
    depth = sum(weights[count * at].shape[1] + weights[count * at + 1].shape[1] for at in range(cells)) / cells
    return steps * cells, samples, gates, depth


def _name(operation: Any) -> str:
    return str(operation).replace("::", ".")


__all__ = ["GRU", "LSTM", "RNN_RELU", "RNN_TANH", "on_cudnn", "recurrent_output", "recurrent_sizes"]

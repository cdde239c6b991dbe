"""LSTM, GRU and plain recurrent layers as one call of cuDNN, on fake tensors of the CPU.

The CPU steps through time and keeps each step's gates; cuDNN makes the output, the last states and one
reserve, kept for the backward pass. The content of the reserve is not documented; see `reserve_bytes`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Kept values per step, in multiples of the hidden size: the gates, and the cell's or hidden state.
KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}


def layer(kind: str, *args: Any) -> tuple[Tensor, ...]:
    """Return the result of `torch.lstm` and similar functions; ``args`` as theirs, packed sequences too.

    Returns:
        The output and the last states: hidden, and for an LSTM the cell's.
    """
    packed = isinstance(args[3], (list, tuple))
    inputs = args[0]
    states, weights, _, layers, dropout, train, bidirectional, *_rest = args[2 if packed else 1 :]
    states = tuple(states) if isinstance(states, (list, tuple)) else (states,)
    if torch.is_autocast_enabled("cpu"):
        low = torch.get_autocast_dtype("cpu")
        inputs, *states = (t.to(low) for t in (inputs, *states))
        weights = [w.to(low) for w in weights]
    cells = inputs.shape[:-1].numel() * layers * (2 if bidirectional else 1)
    reserve = 0
    if train and torch.is_grad_enabled():
        reserve = reserve_bytes(kind, cells, states[-1].shape[-1], inputs.dtype.itemsize)
        reserve += cells // layers * (layers - 1) * states[-1].shape[-1] if dropout > 0 else 0
    shape = (*inputs.shape[:-1], states[0].shape[-1] * (2 if bidirectional else 1))
    made: tuple[Tensor, ...] = _Layer.apply(shape, reserve, len(states), inputs, *states, *weights)
    return made


def reserve_bytes(kind: str, cells: int, width: int, itemsize: int) -> int:
    """Estimate the reserve that `cudnnGetRNNTempSpaceSizes` returns for training, without dropout, in bytes.

    Args:
        kind: "lstm", "gru", "rnn_tanh" or "rnn_relu".
        cells: elements of the batch times steps of time times layers times directions.
        width: of the hidden state.
        itemsize: bytes of one value.
    """
    return KEPT[kind] * cells * width * itemsize


class _Layer(torch.autograd.Function):
    """One call of cuDNN's recurrent layers."""

    @staticmethod
    def forward(
        ctx: Any, shape: tuple[int, ...], reserve: int, states: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs = tensors[0]
        made = (inputs.new_empty(shape), *(t.new_empty(t.shape) for t in tensors[1 : 1 + states]))
        kept = inputs.new_empty(reserve, dtype=torch.uint8)
        ctx.save_for_backward(*tensors, made[0], kept)
        return made

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors[:-2]
        wanted = zip(tensors, ctx.needs_input_grad[3:], strict=True)
        return (None, None, None, *(torch.empty_like(t) if need else None for t, need in wanted))

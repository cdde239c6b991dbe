"""Gradients that PyTorch writes in place, but not where tensors are without memory.

Some of autograd's functions make zeros and fill them. Where a mode or a subclass of tensors is at work
(`at::areAnyTensorSubclassLike`, `FunctionsManual.cpp`) they fill a copy instead, so that such a tensor is not
lost; then one buffer more is alive than in a run. Here the zeros are filled themselves, as in a run.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
#: Nodes that choose elements along a dimension (`value_selecting_reduction_backward`).
_SELECTING = frozenset(
    f"{name}Backward{number}"
    for name in ("Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode", "Max", "Min")
    for number in (0, 1)
)
#: Of an operation out of place: the nodes that do it on zeros of their own, and what they do in a run.
IN_PLACE: dict[Any, tuple[frozenset[str], Any]] = {
    _aten.scatter_add.default: (
        frozenset({"GatherBackward0", "CummaxBackward0", "CumminBackward0"}),
        _aten.scatter_add_.default,
    ),
    _aten.scatter.src: (_SELECTING, _aten.scatter_.src),
    _aten.index_add.default: (frozenset({"IndexSelectBackward0"}), _aten.index_add_.default),
    _aten.index_put.default: (frozenset({"IndexBackward0"}), _aten.index_put_.default),
    _aten.put.default: (frozenset({"TakeBackward0"}), _aten.put_.default),
    _aten.index_fill.int_Scalar: (frozenset({"TraceBackward0"}), _aten.index_fill_.int_Scalar),
    _aten.index_fill.int_Tensor: (frozenset({"TraceBackward0"}), _aten.index_fill_.int_Tensor),
}


def in_place(operation: Any) -> Any:
    """What a run would do in the backward that is at work: another operation, or the same.

    Args:
        operation: one of `IN_PLACE`.
    """
    node = torch._C._current_autograd_node()
    nodes, instead = IN_PLACE[operation]
    return instead if node is not None and node.name() in nodes else operation

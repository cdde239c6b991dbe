"""Places at which a program reads values of tensors on the device, which a rehearsal cannot know."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

#: Methods of a tensor that return its values to the program, or whose result's shape depends on the values.
_READS = (
    *("__bool__", "__float__", "__int__", "__index__", "item", "tolist"),
    *("nonzero", "unique", "masked_select"),
)
_FUNCTIONS = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select")
_MOST = 1000  #: places to remember


def install(places: dict[str, int]) -> None:
    """Count the reads at each innermost line of the program, in a table of ``file:line`` -> number."""
    import torch

    for name in _READS:
        setattr(torch.Tensor, name, _counting(getattr(torch.Tensor, name), places))
    for name in _FUNCTIONS:
        setattr(torch, name, _counting(getattr(torch, name), places))
    select, counted = torch.Tensor.__getitem__, _counting(torch.Tensor.__getitem__, places)

    def get_item(tensor: Any, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        masked = any(isinstance(part, torch.Tensor) and part.dtype is torch.bool for part in parts)
        return (counted if masked else select)(tensor, index)

    torch.Tensor.__getitem__ = get_item


def _counting(method: Callable[..., Any], places: dict[str, int]) -> Callable[..., Any]:
    from mempool.rehearsal.child import program_line

    @functools.wraps(method)
    def read(tensor: Any, *args: Any, **options: Any) -> Any:
        if tensor.device.type == "cuda":
            place = program_line(sys._getframe(1))
            if place in places or len(places) < _MOST:
                places[place] = places.get(place, 0) + 1
        return method(tensor, *args, **options)

    return read

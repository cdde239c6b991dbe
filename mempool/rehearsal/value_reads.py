"""Counts of a program's reads of values on the device, which a rehearsal does not know."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mempool.rehearsal.program_lines import program_line

if TYPE_CHECKING:
    from collections.abc import Callable

#: Methods of a tensor that return its values to the program.
_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist")
#: Methods and functions whose result's shape depends on values; for masks see
#: `mempool.rehearsal.value_rules`.
_SHAPES = ("unique", "unique_consecutive")
_MOST = 1000  #: most source lines to remember


def install(reads: dict[str, int], shapes: dict[str, int]) -> None:
    """Start counting reads, and results of unknown shape, by innermost line of the program.

    Args:
        reads: number of reads, by ``file:line``.
        shapes: number of results whose shape depends on values, by ``file:line``.
    """
    import torch

    for name in _READS:
        setattr(torch.Tensor, name, _counting(getattr(torch.Tensor, name), reads))
    for name in _SHAPES:
        for owner in (torch.Tensor, torch):
            setattr(owner, name, _counting(getattr(owner, name), shapes))


def _counting(method: Callable[..., Any], places: dict[str, int]) -> Callable[..., Any]:
    @functools.wraps(method)
    def read(tensor: Any, *args: Any, **options: Any) -> Any:
        if tensor.device.type == "cuda":
            note(places, sys._getframe(1))
        return method(tensor, *args, **options)

    return read


def note(places: dict[str, int], frame: Any) -> None:
    """Count the innermost line of the program in a stack, except for reads of a compiler."""
    from torch._guards import CompileContext

    if CompileContext.try_get() is not None:
        return
    place = program_line(frame)
    if place in places or len(places) < _MOST:
        places[place] = places.get(place, 0) + 1

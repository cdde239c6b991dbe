"""Compile graphs without those inductor rules whose rounding depends on the other readers of a value."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch._inductor.fx_passes import post_grad

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Checks that inductor makes before it fuses a product and a sum into one operation (first: if the product
#: has no other reader), or splits such an operation into two (second: depending on the readers of the sum).
_CHECKS = ("is_valid_addmm_fusion", "should_prefer_unfused_addmm")


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Disable the fusing and splitting of products and sums.

    Keeping, offloading or recomputing values for a limit changes the readers of a value, and a fused product
    and sum has other last bits than a product that is computed first.
    """
    entries = [
        entry
        for patterns in getattr(post_grad, "pass_patterns", ())
        for found in patterns.patterns.values()
        for entry in found
        if getattr(entry.extra_check, "__name__", "") in _CHECKS
    ]
    asked = [entry.extra_check for entry in entries]
    for entry in entries:
        entry.extra_check = _no
    try:
        yield
    finally:
        for entry, check in zip(entries, asked, strict=True):
            entry.extra_check = check


def _no(_: Any) -> bool:
    return False

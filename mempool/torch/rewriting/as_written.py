"""Graphs compiled with no rule of inductor's that rounds otherwise by who else reads a value."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch._inductor.fx_passes import post_grad

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What inductor asks before it makes one operation of a product and a sum, or two of one that is both: the
#: first where nobody else reads the product, the second by who reads the sum.
_CHECKS = ("is_valid_addmm_fusion", "should_prefer_unfused_addmm")


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Have products and sums stay what they are.

    What is kept, moved or made again for a limit decides who reads a value, and a product that is added up
    with something else has other last bits than one that is made first.
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

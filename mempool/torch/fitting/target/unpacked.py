"""Sequences are taken not to be packed several into one, where values would tell.

The package transformers looks at positions to know whether they are, and, since a fake tensor has no values,
takes them to be: every layer then has a mask of the square of the length, and another kernel of attention.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any

from torch.nn.modules.module import register_module_forward_pre_hook

if TYPE_CHECKING:
    from collections.abc import Iterator

_WHERE, _WHAT = "transformers.masking_utils", "find_packed_sequence_indices"


@contextlib.contextmanager
def sequences_unpacked() -> Iterator[None]:
    """Let transformers find no packed sequences while the block runs; it may be imported in it."""
    with contextlib.ExitStack() as stack:

        def look() -> None:
            module = sys.modules.get(_WHERE)
            before = getattr(module, _WHAT, None)
            if module is not None and before not in (None, _none):
                setattr(module, _WHAT, _none)
                stack.callback(setattr, module, _WHAT, before)

        def at_first_call(*_: Any) -> None:
            handle.remove()
            look()

        handle = register_module_forward_pre_hook(at_first_call)
        stack.callback(handle.remove)
        look()
        yield


def _none(position_ids: Any) -> None:
    """No sequence begins within another."""

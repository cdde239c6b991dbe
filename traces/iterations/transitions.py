"""Transitions between variants: how far the buffers of an iteration reach into the next one, by variant.

If a program marks iterations of several variants, such as batches of several lengths, any variant may follow
any other, and each variant frees the buffers that are alive at its beginning at other positions.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from traces.iterations.windows import Windows


def sequence_key(
    size: NDArray[np.int64], sequence: NDArray[np.int32], least: NDArray[np.int64] | None = None
) -> bytes:
    """Return a key of the sizes and their order, equal in every process.

    Args:
        size: size of each allocation in bytes.
        sequence: sequence of each allocation.
        least: for an envelope, the least size of each allocation.
    """
    told = np.stack([size, sequence.astype(np.int64), *([] if least is None else [least])])
    return hashlib.blake2b(told.tobytes(), digest_size=16).digest()


def reaches(found: Iterable[Windows]) -> list[dict[bytes, NDArray[np.int64]]]:
    """Return the `traces.iterations.pattern.Pattern.reach` of each variant.

    The reach is empty for a variant with a varying or unsynchronised sequence, since the order of its events
    in the next iteration is unknown.

    Args:
        found: the variants of one trace, as `traces.iterations.windows.find_windows` returns them.
    """
    kinds = list(found)
    key_of: dict[int, bytes] = {}  # by window
    for kind in kinds:
        if len(kind.marks) and _is_whole(kind):
            last = slice(*kind.bounds[kind.alike[-1]])
            least = None if kind.least is None else kind.least[last]
            key_of |= dict.fromkeys(kind.alike, sequence_key(kind.size[last], kind.sequence[last], least))
    return [_reach(kind, key_of) if kind.alike[-1] in key_of else {} for kind in kinds]


def _is_whole(kind: Windows) -> bool:
    """Return true if all sequences have the same common order in every iteration of this variant."""
    windows = [slice(*kind.bounds[window]) for window in kind.alike]
    first = kind.sequence[windows[0]].tobytes(), kind.size[windows[0]].tobytes()
    return all((kind.sequence[w].tobytes(), kind.size[w].tobytes()) == first for w in windows[1:])


def _reach(kind: Windows, key_of: dict[int, bytes]) -> dict[bytes, NDArray[np.int64]]:
    """Return the most allocations of the next iteration before each free; 0 without observations."""
    reach: dict[bytes, NDArray[np.int64]] = {}
    for window in kind.alike:
        first, end = kind.bounds[window].tolist()
        if window + 1 not in key_of or kind.bounds[window + 1, 0] != end:
            continue
        into = np.maximum(kind.freed_before[first:end] - end, 0)
        key = key_of[window + 1]
        reach[key] = np.maximum(reach[key], into) if key in reach else into
    return reach

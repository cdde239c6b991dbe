"""How far the buffers of an iteration reach into the next one, by what kind of iteration that is.

Where a program marks iterations of several kinds, as batches of several lengths are, each follows any other,
and what is still alive at a mark is freed in another place of each.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from traces.windows import Windows


def sequence_key(
    size: NDArray[np.int64], sequence: NDArray[np.int32], least: NDArray[np.int64] | None = None
) -> bytes:
    """The same for iterations that allocate the same sizes in the same order, in any process.

    Args:
        size: of each allocation, in bytes.
        sequence: of each allocation.
        least: of an envelope, the least size of each.
    """
    told = np.stack([size, sequence.astype(np.int64), *([] if least is None else [least])])
    return hashlib.blake2b(told.tobytes(), digest_size=16).digest()


def reaches(found: Iterable[Windows]) -> list[dict[bytes, NDArray[np.int64]]]:
    """For each kind of iteration, the `traces.pattern.Pattern.reach` of its patterns.

    Empty for a kind of which some sequence varies, or keeps its own order only: nobody knows then what comes
    before what in the next one.

    Args:
        found: the kinds of one trace, as `traces.windows.find_windows` gives them.
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
    """Whether all sequences keep one common order in every iteration of this kind."""
    windows = [slice(*kind.bounds[window]) for window in kind.alike]
    first = kind.sequence[windows[0]].tobytes(), kind.size[windows[0]].tobytes()
    return all((kind.sequence[w].tobytes(), kind.size[w].tobytes()) == first for w in windows[1:])


def _reach(kind: Windows, key_of: dict[int, bytes]) -> dict[bytes, NDArray[np.int64]]:
    """How many allocations of the next came before each free, at most; 0 also where none was seen."""
    reach: dict[bytes, NDArray[np.int64]] = {}
    for window in kind.alike:
        first, end = kind.bounds[window].tolist()
        if window + 1 not in key_of or kind.bounds[window + 1, 0] != end:
            continue
        into = np.maximum(kind.freed_before[first:end] - end, 0)
        key = key_of[window + 1]
        reach[key] = np.maximum(reach[key], into) if key in reach else into
    return reach

"""Names of a trace for a page: only names that occur, and no more than a page should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.show.packed_columns import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mempool.show.packed_columns import Packer

#: Limits per timeline of a page: names, lines of stacks, and characters of ids.
MOST_NAMES = 20_000
_MOST_LINES, _MOST_IDS = 50_000, 4_000_000
#: Most lines of a stack; deeper stacks are recursions.
_DEEPEST = 300


def named(packer: Packer, index: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any] | None:
    """Pack the names that occur, or the most frequent ones, and for each index a position among these names.

    Returns None if no name is known.
    """
    known = _frequent(index, len(names))
    if len(known) == 0:
        return None
    return {
        "names": [clean(names[k]) for k in known.tolist()],
        "of": packer.column(_places(known, index, len(names))),
    }


def stacks(packer: Packer, index: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any] | None:
    """Pack the stacks that occur as a table: the depth of each stack, and all lines one after the other.

    Returns None if no stack is known.
    """
    lines: dict[str, int] = {}
    depth: list[int] = []
    flat: list[int] = []
    known = _frequent(index, len(names))
    for k in known.tolist():
        stack = [clean(line) for line in names[k].split("\n", _DEEPEST)[:_DEEPEST]]
        if len(lines) + len(stack) > _MOST_LINES or len(flat) > 20 * _MOST_LINES:
            break
        flat += [lines.setdefault(line, len(lines)) for line in stack]
        depth.append(len(stack))
    if not depth:
        return None
    return {
        "names": list(lines),
        "depth": packer.column(depth),
        "lines": packer.column(flat),
        "of": packer.column(_places(known[: len(depth)], index, len(names))),
    }


def pools(packer: Packer, pool: NDArray[np.int64]) -> dict[str, Any] | None:
    """Pack the pools of the buffers; None if all buffers are in the common pool."""
    known, place = np.unique(pool, return_inverse=True)
    if not known.any():
        return None
    called = ["common" if one == 0 else f"private {one}" for one in known[:MOST_NAMES].tolist()]
    return {"names": called, "of": packer.column(np.where(place < MOST_NAMES, place, -1))}


def ids_of(ids: Sequence[str] | None, rows: NDArray[np.int64]) -> list[str] | None:
    """Return the ids of rows, or None if the ids are too long for a page."""
    if ids is None:
        return None
    kept = [clean(ids[row]) for row in rows.tolist()]
    return kept if sum(map(len, kept)) <= _MOST_IDS else None


def _frequent(index: NDArray[np.int64], names: int) -> NDArray[np.int64]:
    count = np.bincount(index[index >= 0], minlength=names)
    known = np.argsort(-count, kind="stable")[:MOST_NAMES]
    return known[count[known] > 0]


def _places(known: NDArray[np.int64], index: NDArray[np.int64], names: int) -> NDArray[np.int64]:
    """Return the position of each index among the known ones, -1 for an unknown index."""
    place = np.full(names + 1, -1)
    place[known] = np.arange(len(known))
    return place[index]

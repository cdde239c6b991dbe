"""Packing of columns of numbers, names and stacks into one compressed string for a page.

Layout, little-endian: the length of a JSON text in 4 bytes, the text, then each column's bytes plane by
plane, the lowest first, which groups similar bytes for compression. The whole is gzipped and in base64. All
text from traces is in this string, so it is never interpreted as markup.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


#: Most characters of a name.
_LONGEST_NAME = 300
_GZIP = 31  # zlib's code for a window of 32 KiB with gzip's header
_LEVEL = 1  # others take three times as long and save a tenth


class Packer:
    """Collector of columns; `column` returns the JSON description of a column."""

    def __init__(self) -> None:
        self._planes: list[bytes] = []
        self._at = 0

    def column(self, values: ArrayLike, *, delta: bool = False) -> dict[str, Any]:
        """Add whole numbers >= -1 in the bytes that the largest needs; ``delta``: for ascending numbers."""
        numbers = np.asarray(values, np.int64)
        first = int(numbers[0]) if delta and len(numbers) else 0
        stored = np.diff(numbers, prepend=first) if delta else numbers + 1
        width = max((int(stored.max(initial=0)).bit_length() + 7) // 8, 1)
        planes: NDArray[np.uint8] = stored.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width]
        self._planes.append(np.ascontiguousarray(planes.T).tobytes())
        said = {"at": self._at, "count": len(numbers), "width": width, "delta": delta, "first": first}
        self._at += width * len(numbers)
        return said

    def packed(self, text: Any) -> str:
        """Return all columns and a JSON object as one string."""
        said = json.dumps(text, separators=(",", ":")).encode("ascii")
        squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        parts = [len(said).to_bytes(4, "little"), said, *self._planes]
        return base64.b64encode(b"".join([*map(squeeze.compress, parts), squeeze.flush()])).decode("ascii")


def clean(name: str) -> str:
    """Return a name of bounded length, without control characters and direction marks.

    Direction marks would change the display of other names.
    """
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    return name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name)


#: Limits per timeline of a page: names, lines of stacks, and characters of ids.
MOST_NAMES = 20_000
_MOST_LINES, _MOST_IDS = 50_000, 4_000_000
#: Most lines of a stack; deeper stacks are recursions.
_DEEPEST = 300


def named(packer: Packer, index: NDArray[np.int64], names: Sequence[str]) -> dict[str, Any] | None:
    """Pack the used names, or the most frequent of them, and the position of each index among them.

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
    """Pack the used stacks as a table: the depth of each stack, and the lines of all stacks in order.

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
    """Return the position of each index in `known`, -1 for unknown indices."""
    place = np.full(names + 1, -1)
    place[known] = np.arange(len(known))
    return place[index]

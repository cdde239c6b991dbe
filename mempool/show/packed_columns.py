"""Packing of columns of numbers and text as one compressed string that a page can hold and a browser opens.

Layout, little-endian: the length of a JSON text in 4 bytes, the text, then each column's bytes plane by
plane, lowest first: this groups similar bytes, which compress well. The whole is gzipped and in base64. Text
from traces is nowhere else in a page, so no such text is ever interpreted as markup.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: Characters kept of a name; the rest adds no information.
_LONGEST_NAME = 300
_GZIP = 31  # zlib's code for a window of 32 KiB with gzip's header
_LEVEL = 1  # other levels take three times as long for a tenth less


class Packer:
    """Collector of columns; `column` returns the JSON description of a column."""

    def __init__(self) -> None:
        self._planes: list[bytes] = []
        self._at = 0

    def column(self, values: ArrayLike, *, delta: bool = False) -> dict[str, Any]:
        """Add whole numbers >= -1, in as many bytes as the largest needs; ``delta`` for ascending numbers."""
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

    Direction marks would change how other names are displayed.
    """
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    return name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name)

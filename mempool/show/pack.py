"""Columns of numbers and text as one compressed string that a page can hold and a browser opens.

Little-endian: the length of a JSON text in 4 bytes, the text, then the columns' bytes plane by plane, lowest
first: what is alike comes together, which makes them small. The whole is gzipped and in base64. Text from
traces is nowhere else in a page, so nothing in it is ever taken for markup.
"""

from __future__ import annotations

import base64
import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

#: Of these text is kept; the rest of a name says nothing more.
_LONGEST_NAME = 300
_GZIP = 31  # as zlib calls a window of 32 KiB with gzip's header
_LEVEL = 1  # others take thrice as long for a tenth less


class Packer:
    """Collects columns; `column` returns what the JSON text says about one."""

    def __init__(self) -> None:
        self._planes: list[bytes] = []
        self._at = 0

    def column(self, values: ArrayLike, *, delta: bool = False) -> dict[str, Any]:
        """Add whole numbers from -1 up, in as many bytes as the largest needs; ``delta``: if they ascend."""
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
        """All columns and a JSON object."""
        said = json.dumps(text, separators=(",", ":")).encode("ascii")
        squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
        parts = [len(said).to_bytes(4, "little"), said, *self._planes]
        return base64.b64encode(b"".join([*map(squeeze.compress, parts), squeeze.flush()])).decode("ascii")


def clean(name: str) -> str:
    """A name of bounded length, without controls and direction marks, which change how others are read."""
    name = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
    return name if name.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in name)

"""Helpers for tests of `mempool show`: the packed content of pages, and a small trace."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from traces import EventType, Trace


class Packed:
    """Content packed by `mempool.show.packed_columns`."""

    def __init__(self, text: str) -> None:
        raw = gzip.decompress(base64.b64decode(text, validate=True))
        length = int.from_bytes(raw[:4], "little")
        self.said: dict[str, Any] = json.loads(raw[4 : 4 + length])
        self._planes = raw[4 + length :]

    def column(self, said: dict[str, Any]) -> NDArray[np.int64]:
        """Return a column as it was before packing."""
        count, width = said["count"], said["width"]
        planes = self._planes[said["at"] : said["at"] + count * width]
        values = np.zeros(count, np.int64)
        for k in range(width):
            values |= np.frombuffer(planes, np.uint8, count, k * count).astype(np.int64) << (8 * k)
        return said["first"] + np.cumsum(values) if said["delta"] else values - 1


def four_buffers(**more: Any) -> Trace:
    """Return a trace of four buffers on two streams, of which the last three make the peak of 700 KiB.

    The operations are named one, two, three and four, the frames one.py to four.py.
    """
    a, f, kib = EventType.ALLOC, EventType.FREE, 1024
    columns: dict[str, Any] = {
        "kind": [a, a, f, a, a, f, f, f],
        "buffer": [0, 1, 0, 2, 3, 1, 2, 3],
        "size": [100 * kib, 200 * kib, 0, 400 * kib, 100 * kib, 0, 0, 0],
        "address": [2**40, 2**40 + 100 * kib, -1, 2**40 + 300 * kib, 2**40, -1, -1, -1],
        "stream": [0, 7, 0, 0, 7, 0, 0, 0],
        "operation": [0, 1, -1, 2, 3, -1, -1, -1],
        "frame": [4, 5, -1, 6, 7, -1, -1, -1],
        "time_ns": np.arange(8) * 1_000_000,
        "names": ("one", "two", "three", "four", "one.py:1", "two.py:2", "three.py:3", "four.py:4"),
    }
    return Trace.of(**columns | more)

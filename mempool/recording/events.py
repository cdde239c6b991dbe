"""Conversion of the core's event records into a `Trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mempool._core import EVENT_FIELDS, TraceNames
from traces.trace import AUTOMATIC_MARK, Trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Packed = bytes | NDArray[np.uint8]

RECORD = np.dtype([(name, kind) for name, kind in EVENT_FIELDS])
#: Names of the marks in traces, in the order of the core's mark types; `traces.trace.AUTOMATIC_MARK` follows.
MARKS = ("step", "begin", "end")


class EventConverter:
    """Converter of a recording's pieces into pieces of one trace, with the same buffer ids in all pieces."""

    def __init__(self, alignment: int, *, addresses: bool = False) -> None:
        self._addresses = addresses
        self._metadata = {"alignment": str(alignment)}
        self._names = TraceNames()

    def trace(self, packed: Packed) -> Trace:
        """Convert the next piece.

        Args:
            packed: records from `mempool._core.Client.take_trace`.
        """
        return self._trace(self._names.rows(packed))

    def convert_brief(self, packed: Packed, streams: list[int]) -> Trace:
        """Convert the next piece of a recording without times and without the streams of frees.

        Args:
            packed: records from `mempool._core.Client.recording`.
            streams: stream of each sequence.
        """
        return self._trace(self._names.brief_rows(packed, streams))

    def _trace(self, columns: dict[str, NDArray[Any]]) -> Trace:
        if not self._addresses:
            columns.pop("address", None)
        return Trace.of(**columns, names=(*MARKS, AUTOMATIC_MARK), metadata=self._metadata)

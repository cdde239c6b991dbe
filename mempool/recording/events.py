"""Conversion of the core's event records into a `Trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mempool._core import EVENT_FIELDS, TraceNames
from traces.trace import AUTOMATIC_MARK, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from traces.iterations.pattern import Pattern

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
            del columns["address"]
        return Trace.of(**columns, names=(*MARKS, AUTOMATIC_MARK), metadata=self._metadata)


def find_recurring(
    packed: Packed,
    streams: list[int],
    *,
    alignment: int,
    small_bytes: int,
    whole_recording: bool,
    enveloped: Collection[int] = (),
    interrupt: Callable[[], bool] | None = None,
) -> list[Pattern]:
    """Find the recurring patterns in a recording without times.

    Args:
        packed: records as in `EventConverter.convert_brief`.
        streams: stream of each sequence.
        alignment: alignment of the device, in bytes.
        small_bytes: see `traces.iterations.pattern.find_patterns`.
        whole_recording: see `traces.iterations.pattern.find_patterns`.
        enveloped: see `traces.iterations.pattern.find_patterns`.
        interrupt: polled once before the search; true returns an empty list.
    """
    from traces.iterations.pattern import find_patterns

    if interrupt is not None and interrupt():
        return []
    trace = EventConverter(alignment).convert_brief(packed, streams)
    return find_patterns(trace, small_bytes=small_bytes, whole_recording=whole_recording, enveloped=enveloped)

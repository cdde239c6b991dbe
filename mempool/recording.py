"""From the core's event records to a `Trace`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mempool._core import BRIEF_FIELDS, EVENT_FIELDS
from traces.trace import FOUND, Kind, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from numpy.typing import NDArray

    from traces.pattern import Pattern

    Packed = bytes | NDArray[np.uint8]

RECORD = np.dtype([(name, kind) for name, kind in EVENT_FIELDS])
BRIEF = np.dtype([(name, kind) for name, kind in BRIEF_FIELDS])
#: Names of the marks in traces, by the core's kind of event.
MARKS = ("step", "begin", "end")
_ALLOC, _FREE, _HANDOVER, _USE, _FIRST_MARK, _FOUND = 0, 1, 2, 3, 4, 12


class Recording:
    """Turns pieces of a recording into pieces of one trace: buffers keep their ids across pieces.

    The core tells buffers by address; a trace by ids that are never used twice. Frees of buffers that were
    allocated before the recording began are left out.
    """

    def __init__(self, alignment: int, *, addresses: bool = False) -> None:
        self._addresses = addresses
        self._metadata = {"alignment": str(alignment)}
        self._next_id = 0
        self._alive: dict[int, int] = {}  # address -> id

    def trace(self, packed: Packed) -> Trace:
        """The next piece.

        Args:
            packed: records as `mempool._core.Client.take_tape` gives them.
        """
        records = np.frombuffer(packed, RECORD)
        return self._trace(records, records["stream"], records["time_ns"])

    def brief(self, packed: Packed, streams: list[int]) -> Trace:
        """The next piece, of a recording that has neither the time nor the stream of a free.

        Args:
            packed: records as `mempool._core.Client.recording` gives them.
            streams: of each sequence.
        """
        records = np.frombuffer(packed, BRIEF)
        stream = np.array(streams or [0], np.int64)[records["sequence"]]
        stream = np.where(records["kind"] == _USE, records["size"].astype(np.int64), stream)
        return self._trace(records, stream, np.zeros(len(records), np.int64))

    def _trace(self, records: NDArray[Any], stream: NDArray[Any], time_ns: NDArray[Any]) -> Trace:
        buffer = self._ids(records)
        rows = _in_the_programs_order(records["kind"])
        buffer, records, stream = buffer[rows], records[rows], stream[rows]  # at the times as they were
        kind = np.where(records["kind"] == _HANDOVER, _FREE, records["kind"])
        kind = np.where(kind == _USE, np.uint32(Kind.READ), kind)
        mark = kind >= _FIRST_MARK
        rows = np.flatnonzero(mark | (buffer >= 0))
        kind, buffer, mark = kind[rows], buffer[rows], mark[rows]
        event = np.where(mark, Kind.MARK, kind).astype(np.uint8)
        return Trace.of(
            event,
            buffer,
            np.where(event == Kind.ALLOC, records["size"][rows], 0).astype(np.int64),
            stream=stream[rows],
            thread=records["sequence"][rows].astype(np.int32),
            time_ns=time_ns[rows].astype(np.int64),
            operation=np.where(
                mark, np.where(kind == _FOUND, len(MARKS), kind.astype(np.int32) - _FIRST_MARK), -1
            ),
            address=np.where(event == Kind.ALLOC, records["address"][rows].astype(np.int64), -1)
            if self._addresses
            else -1,
            names=(*MARKS, FOUND),
            metadata=self._metadata,
        )

    def _ids(self, records: NDArray[Any]) -> NDArray[np.int64]:
        """Buffer id of each record; -1 for marks and for frees and uses of unknown buffers."""
        kind, address = records["kind"], records["address"]
        ids = np.full(len(records), -1, np.int64)
        born = np.flatnonzero(kind == _ALLOC)
        ids[born] = self._next_id + np.arange(len(born))
        self._next_id += len(born)
        rows = np.flatnonzero(kind < _USE)
        order = rows[np.argsort(address[rows], kind="stable")]  # by address, then in time
        same = np.zeros(len(order), np.bool_)
        same[1:] = address[order[1:]] == address[order[:-1]]
        freed = kind[order] != _ALLOC
        after_alloc = np.zeros(len(order), np.bool_)
        after_alloc[1:] = same[1:] & ~freed[:-1]
        known = freed & after_alloc
        ids[order[known]] = ids[order[np.flatnonzero(known) - 1]]
        self._name_uses(ids, kind, address, order)
        for row in order[freed & ~same]:  # the first that is heard of this address here
            ids[row] = self._alive.pop(int(address[row]), -1)
        last = np.ones(len(order), np.bool_)
        last[:-1] = ~same[1:]
        for row in order[last & ~freed]:
            self._alive[int(address[row])] = int(ids[row])
        return ids

    def _name_uses(
        self, ids: NDArray[np.int64], kind: NDArray[Any], address: NDArray[Any], order: NDArray[np.intp]
    ) -> None:
        """Give each use the id of the buffer that lived there then; the others, so ordered, have theirs."""
        sorted_addresses = address[order]
        for row in np.flatnonzero(kind == _USE).tolist():
            first = np.searchsorted(sorted_addresses, address[row], "left")
            here = order[first : np.searchsorted(sorted_addresses, address[row], "right")]
            before = int(np.searchsorted(here, row))
            if before == 0:
                ids[row] = self._alive.get(int(address[row]), -1)
            elif kind[here[before - 1]] == _ALLOC:
                ids[row] = ids[here[before - 1]]


def recurring(
    packed: Packed,
    streams: list[int],
    *,
    alignment: int,
    small_bytes: int,
    whole_recording: bool,
    enveloped: Collection[int] = (),
    interrupt: Callable[[], bool] | None = None,
) -> list[Pattern]:
    """What recurs in a recording without times.

    Args:
        packed: as of `Recording.brief`.
        streams: of each sequence.
        alignment: of the device, in bytes.
        small_bytes: as of `traces.pattern.find_patterns`.
        whole_recording: likewise.
        enveloped: likewise.
        interrupt: whether to stop, with nothing.
    """
    from traces.pattern import find_patterns

    if interrupt is not None and interrupt():
        return []
    trace = Recording(alignment).brief(packed, streams)
    return find_patterns(trace, small_bytes=small_bytes, whole_recording=whole_recording, enveloped=enveloped)


def _in_the_programs_order(kind: NDArray[np.uint32]) -> NDArray[np.intp]:
    """The rows with each handover behind the allocation that took its memory: for the program both lived."""
    rows = np.arange(len(kind))
    before = np.flatnonzero(kind[:-1] == _HANDOVER)
    before = before[kind[before + 1] == _ALLOC]
    rows[before], rows[before + 1] = before + 1, before
    return rows

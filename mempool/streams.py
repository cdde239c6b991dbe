"""Conversion of stream handles into the core's stream numbers."""

from __future__ import annotations

from mempool import _core

#: Handles of default streams: the legacy stream (which also has the handle 0), and the per-thread stream, a
#: different stream in each thread.
LEGACY, PER_THREAD = 1, 2


def stream_number(handle: int) -> int:
    """Return the core's number of a stream, given its handle in the calling thread."""
    return {LEGACY: 0, PER_THREAD: _core.thread_stream()}.get(handle, handle)

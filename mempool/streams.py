"""What the core calls a stream that a framework tells by its handle."""

from __future__ import annotations

from mempool import _core

#: Handles of default streams: the legacy one has two, and the other means another stream in each thread.
LEGACY, PER_THREAD = 1, 2


def number(handle: int) -> int:
    """Of the stream that this handle means in the calling thread."""
    return {LEGACY: 0, PER_THREAD: _core.thread_stream()}.get(handle, handle)

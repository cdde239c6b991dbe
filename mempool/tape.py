"""Everything a client does, written to a trace file while it runs."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from mempool.recording import Recording

if TYPE_CHECKING:
    from mempool import _core


class Tape:
    """Drains a client's tape into a Parquet trace; the file appears when it is closed, and whole."""

    def __init__(self, client: _core.Client, path: str, alignment: int) -> None:
        """Begin to record.

        Args:
            client: whose events.
            path: of the trace.
            alignment: of the device, in bytes.
        """
        from traces.parquet import TraceWriter

        self._client = client
        self._recording = Recording(alignment)
        self._writer = TraceWriter(path, metadata={"alignment": str(alignment)})
        self._lock = threading.Lock()
        self._open = True
        try:
            self._writer.__enter__()
        except OSError as error:  # of the file beside it, whose name nobody knows
            raise OSError(error.errno, error.strerror, path) from None
        client.set_tape(True)

    def drain(self) -> None:
        """Write what has come since the last call.

        What cannot be written is lost, and a trace with a hole is worse than none: the first failure ends the
        recording and leaves no file.
        """
        with self._lock:
            if not self._open or not (packed := self._client.take_tape()):
                return
            try:
                self._writer.write(self._recording.trace(packed))
            except BaseException as error:
                self._open = False
                self._client.set_tape(False)
                self._writer.__exit__(type(error), error, error.__traceback__)
                raise

    def close(self) -> None:
        """Stop recording and finish the file."""
        self._client.set_tape(False)
        self.drain()
        with self._lock:
            if self._open:
                self._open = False
                self._writer.__exit__(None, None, None)

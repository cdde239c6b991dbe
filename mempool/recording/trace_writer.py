"""Trace writer: writes all events of a client to a trace file while the program runs."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path

from mempool import _core
from mempool.logs import log
from mempool.recording.events import EventConverter

#: Seconds that events wait in memory; a program that mainly allocates makes some 10 MB of events in this
#: time.
SECONDS_BETWEEN_DRAINS = 0.1


_writers: weakref.WeakSet[BackgroundTraceWriter] = weakref.WeakSet()


def _leave_files_to_the_parent() -> None:
    for tape in list(_writers):
        tape.disown()


os.register_at_fork(after_in_child=_leave_files_to_the_parent)


class BackgroundTraceWriter:
    """Writer of a client's events into a Parquet trace; the complete file appears at the close."""

    def __init__(self, client: _core.Client, path: str, alignment: int, name: str) -> None:
        """Start recording.

        Args:
            client: client whose events are written.
            path: path of the trace.
            alignment: alignment of the device, in bytes.
            name: name of the client, written to the trace's metadata as ``client``.
        """
        from traces.formats.parquet import TraceWriter

        self._client, self._path = client, str(path)
        self._recording = EventConverter(alignment)
        self._writer = TraceWriter(path, metadata={"alignment": str(alignment), "client": name})
        self._lock = threading.Lock()
        self._open = True
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._unreported_error: Exception | None = None
        self._pid = os.getpid()
        try:
            self._writer.__enter__()
        except OSError as error:  # names the temporary file
            raise OSError(error.errno, error.strerror, path) from None
        client.set_tracing(True, folder=str(Path(path).absolute().parent))
        _writers.add(self)

    def start(self) -> None:
        """Start a separate thread that drains, since the planner's thread may solve for seconds."""
        self._thread = threading.Thread(target=self._run, name="mempool-tape", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with _core.Bypass():
            while not self._stop.wait(SECONDS_BETWEEN_DRAINS):
                try:
                    self.drain()
                except Exception as error:
                    if self._stop.is_set() or not threading.main_thread().is_alive():
                        self._unreported_error = error  # `close` waits for this thread, and raises
                        return
                    why = (isinstance(error, OSError) and error.strerror) or error or type(error).__name__
                    log.error("%s: the trace cannot be written (%s); recording has ended", self._path, why)
                    return

    def drain(self) -> None:
        """Write the events since the last call.

        The first lost or unwritable event ends the recording without a file, since a trace with a hole is
        useless.

        Raises:
            OSError: the file cannot be written, or events were lost for lack of memory.
        """
        with self._lock:
            if not self._open:
                return
            try:
                more = True
                while more:  # this loop's allocations may be recorded, too
                    more = self._client.state()["trace_in_file"] > 0
                    if packed := self._client.take_trace():
                        self._writer.write(self._recording.trace(packed))
                if lost := self._client.state()["trace_lost"]:
                    raise OSError(
                        errno.ENOSPC, f"no room for {lost:,} events until they are written", self._path
                    )
            except BaseException as error:
                self._open = False
                self._client.set_tracing(False)
                self._writer.__exit__(type(error), error, error.__traceback__)
                raise

    def disown(self) -> None:
        """Stop recording in a forked child, and leave the file to the parent."""
        self._client.set_tracing(False)
        self._open = False
        self._writer.disown()

    def close(self) -> None:
        """Stop recording and finish the file.

        Raises:
            OSError: the file cannot be written, and no earlier call has raised this error.
        """
        self._client.set_tracing(False)
        self._stop.set()
        if self._thread is not None and self._pid == os.getpid():
            self._thread.join()
            if self._unreported_error is not None:
                raise self._unreported_error
        self.drain()
        with self._lock:
            if self._open:
                self._open = False
                self._writer.__exit__(None, None, None)

"""Memory snapshots of PyTorch, as ``torch.cuda.memory._dump_snapshot`` writes them, as traces.

A buffer lives from its ``alloc`` to its ``free_completed``: between ``free_requested`` and that its memory is
still in use on another stream. The recorder keeps the last events only, or none, so buffers may have been
there before it: those that are freed without an alloc, and those that the segments still hold at the end.
They are born at its start, after the segments that were there (`traces.completeness`). Sizes are the
requested ones. Out-of-memory events are refused requests, annotations are marks of ranges, and an optimizer's
annotation ends an iteration. Other actions are counted in the metadata, not kept. The pickle is read piece by
piece, by opcodes that can name and call nothing.
"""

from __future__ import annotations

import gzip
import json
import os
import threading
import zlib
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from traces import _core
from traces.completeness import known_before, with_device_free
from traces.errors import TraceError
from traces.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath

#: PyTorch's caching allocator rounds sizes up to this (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
ALIGNMENT = 512
_LONGEST_SETTING = 1000
#: How a file begins that gzip compressed.
GZIP = b"\x1f\x8b"
#: Fewer are no history: of ``_record_memory_history(enabled="state")`` PyTorch keeps the last event.
_LEAST_EVENTS = 2
_PIECE_BYTES = 1 << 20


def read_snapshot(
    path: StrPath,
    *,
    paths: bool = False,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read a snapshot: every device, ordered by time, with addresses, operations, lines and Python stacks.

    Metadata: ``framework``, ``recorder``, ``alignment``, ``alive_before`` (how many buffers are older),
    those of `traces.completeness`, ``expandable`` (``1`` if any segment is, else ``0``), ``setting.NAME`` of
    the allocator, as JSON unless it is a text and without what is longer than 1000 characters, and, for each
    action that is not kept, ``action.NAME``, how often. Unknown keys are passed over, whatever plain data
    they have.

    Takes less memory than the file does, if its events have stacks; Ctrl-C ends it.

    Args:
        path: a file of the pickle protocols 2 to 5, as it is or compressed by gzip: what ``_dump_snapshot``
            wrote, or the list of segments that ``torch.cuda.memory_snapshot`` returned.
        paths: keep the folders of source lines, not the file's name alone.
        skipped: where given, events and segments that contradict others or are impossible in themselves are
            left out and counted here under their reason. Of a truncated file the whole events before its end
            are kept, without what the segments say, and ``truncated`` is counted.
        progress: called now and then with the bytes that were read and those of the file (0: not known).

    Raises:
        TraceError: naming file and event or byte: not a snapshot, a truncated one, a pickle of anything but
            plain data, one that holds itself or unfolds to much more than its size, events that contradict
            each other.
        OSError: the file cannot be read.
    """
    try:
        with _plain(path) as (descriptor, total):
            read = _core.read_snapshot(descriptor, total, skipped is not None, paths, progress)
        trace = Trace.of(**read.columns, names=read.names, metadata=_metadata(read))
        trace.validate()
    except _core.Refused as error:
        raise TraceError(str(error), file=path) from None
    except TraceError as error:
        raise error.within(path) from None
    if skipped is not None:
        skipped.update(read.skipped)
    return trace


@contextmanager
def _plain(path: StrPath) -> Iterator[tuple[int, int]]:
    """Open a file for reading by its descriptor; yield that and the file's bytes, 0 if it is compressed."""
    with Path(path).open("rb", buffering=0) as file:
        packed = file.seekable() and file.read(2) == GZIP
        if file.seekable():
            file.seek(0)
        if not packed:
            yield file.fileno(), os.fstat(file.fileno()).st_size
            return
    reader, writer = os.pipe()
    errors: list[Exception] = []
    thread = threading.Thread(target=_unpack, args=(path, writer, errors), daemon=True)
    thread.start()
    try:
        yield reader, 0
    except _core.Refused:
        thread.join()
        if errors:  # the pickle ends where the compressed file is damaged
            raise TraceError(f"a damaged gzip file ({errors[0]})") from None
        raise
    finally:
        os.close(reader)
        thread.join()


def _unpack(path: StrPath, descriptor: int, errors: list[Exception]) -> None:
    """Write a compressed file's content to a pipe until its end, or until nobody reads on."""
    try:
        with os.fdopen(descriptor, "wb") as pipe, gzip.open(path) as file:
            while piece := file.read(_PIECE_BYTES):
                pipe.write(piece)
    except BrokenPipeError:
        pass
    except (OSError, EOFError, zlib.error) as error:
        errors.append(error)


def _metadata(read: _core.Snapshot) -> dict[str, str]:
    actions = Counter[str]()
    for name, count in read.actions.items():
        actions[name[:40]] += count
    return {
        "framework": "pytorch",
        "recorder": "snapshot",
        "alignment": str(ALIGNMENT),
        "alive_before": str(read.alive_before),
        "expandable": str(int(read.expandable)),
        **known_before(
            {
                device: (events >= _LEAST_EVENTS, live, reserved)
                for device, (events, live, reserved) in enumerate(read.known)
            }
        ),
        **with_device_free(read.device_free),
        **_settings(read.settings),
    } | {f"action.{name}": str(count) for name, count in sorted(actions.items())}


def _settings(settings: object) -> dict[str, str]:
    if not isinstance(settings, dict):
        return {}
    texts = {
        f"setting.{str(name)[:40]}": value
        if isinstance(value, str)
        else json.dumps(value, separators=(",", ":"))
        for name, value in settings.items()
    }
    return {name: text for name, text in texts.items() if len(text) <= _LONGEST_SETTING}

"""Reader of PyTorch's memory snapshots, written by ``torch.cuda.memory._dump_snapshot``.

A buffer lives from its ``alloc`` to its ``free_completed``: between ``free_requested`` and
``free_completed``, another stream still uses the memory. The recorder keeps only the last events, or none, so
buffers may be older than the recording: buffers that are freed without an alloc, and buffers without an alloc
that the segments hold at the end. The trace allocates older buffers at its start, after the segments of that
time (`traces.completeness`). Sizes are the requested ones. Out-of-memory events are refused requests,
annotations are marks of ranges, and an optimizer's annotation ends an iteration. Other actions are only
counted, in the metadata. The pickle is read piece by piece, without the opcodes that name or call objects.
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
from traces.formats.text_files import GZIP
from traces.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath

    from traces.formats.text_files import Head

#: Size rounding of PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize).
ALIGNMENT = 512
_LONGEST_SETTING = 1000
#: Fewest events that count as a history: with ``_record_memory_history(enabled="state")`` PyTorch keeps the
#: last event only.
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

    Metadata: ``framework``, ``recorder``, ``alignment``, ``alive_before`` (number of buffers from before the
    recording), the keys of `traces.completeness`, ``expandable`` (``1`` if any segment is, else ``0``),
    ``setting.NAME`` of the allocator, as JSON except for plain texts and only up to 1000 characters, and, for
    each other action, ``action.NAME``, the count. Unknown keys with plain data are ignored.

    If the events have stacks, the call needs less memory than the size of the file. Ctrl-C interrupts the
    call.

    Args:
        path: a file of the pickle protocols 2 to 5, plain or compressed by gzip: the output of
            ``_dump_snapshot``, or the list of segments that ``torch.cuda.memory_snapshot`` returned.
        paths: keep the folders of source lines, instead of the file names alone.
        skipped: if given, contradictory or impossible events and segments are omitted and counted here by
            reason. A truncated file gives its complete events, without the data of the segments, and counts
            as ``truncated``.
        progress: called now and then with the bytes read so far and the bytes of the file (0: not known).

    Raises:
        TraceError: naming file and event or byte: not a snapshot, a truncated snapshot, a pickle of anything
            but plain data, a pickle that contains itself or unfolds to much more than the file, events that
            contradict each other.
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


def is_snapshot(head: Head) -> bool:
    """Return true for a pickle, recognised by the first opcode and the protocol.

    Raises:
        TraceError: a zip file, as ``torch.save`` writes.
    """
    if not head.compressed and head.content.startswith(b"PK\3\4"):
        raise TraceError(
            "a zip file, as torch.save writes it: write the snapshot by torch.cuda.memory._dump_snapshot"
        )
    return head.content[:1] == b"\x80" and head.content[1:2] in (b"\2", b"\3", b"\4", b"\5")


@contextmanager
def _plain(path: StrPath) -> Iterator[tuple[int, int]]:
    """Open a file for reading; yield the descriptor and the size in bytes, 0 if the file is compressed."""
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
    """Write a compressed file's content to a pipe until the end, or until the reader closes the pipe."""
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

"""Reader of the output of CuPy's ``DebugPrintHook``.

Each event is a JSON object on a line: ``malloc`` and ``free`` of the pool are buffers, ``alloc`` is memory
that the pool takes from the device (CuPy, cupy/cuda/memory_hooks/debug_print.py). The hook prints to the
program's output, so lines without such an object, and text before an object, are ignored.
Times, threads and streams are not printed, and the pool does not report returned memory.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from traces.errors import TraceError
from traces.formats.logs import Log, iter_log, number, read_log
from traces.formats.text_files import lines, text_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator

    from _typeshed import StrPath

    from traces.formats.text_files import Head
    from traces.trace import Trace

#: The beginning of an event.
_EVENT = re.compile(rb'\{"hook": ?"')
#: Size rounding of CuPy's pool (cupy/cuda/memory.pyx, ALLOCATION_UNIT_SIZE).
KNOWN = {"framework": "cupy", "alignment": "512"}
#: Upper bound of device indices, which are int32 in a trace; no machine has so many devices.
_MOST_DEVICES = 1 << 16
_NOWHERE = (0, 0, 0)  # stream, thread, time


def read_cupy_hook(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read the output of a ``DebugPrintHook`` as a trace of all devices.

    Metadata: ``framework``, ``alignment``, ``alive_before`` (buffers allocated before the first line) and the
    keys of `traces.completeness`. A failed request of the program becomes a refused request. A failed request
    of the pool to the device is ignored, since the pool may free cached memory and retry.

    Args:
        path: the lines, plain or compressed by gzip.
        skipped: receives the counts of invalid lines, which are left out, by reason; None: the first is an
            error.
        progress: as of `traces.read.read`.

    Raises:
        TraceError: naming the file and, as row, the line: an object that is not CuPy's, or memory allocated
            again without a free, for example because a thread without a hook freed it.
        OSError: the file cannot be read.
    """
    return read_log(path, _fill, KNOWN, skipped, progress)


def iter_cupy_hook(path: StrPath, *, skipped: Counter[str] | None = None) -> Iterator[Trace]:
    """Read the lines twice, in pieces: `traces.formats.logs.iter_log`."""
    return iter_log(path, _fill, KNOWN, skipped)


def is_output(head: Head) -> bool:
    """Return true if the first bytes contain an event of CuPy's hook."""
    return _EVENT.search(head.content) is not None


def _fill(path: StrPath, log: Log) -> Iterator[None]:
    events = 0
    for row, line in lines(path, log.progress):
        if (found := _EVENT.search(line)) is None:
            continue
        events += 1
        try:
            _add(log, _object(text_of(line[found.start() :])))
        except TraceError as error:
            log.reject(error, row)
        yield
    if not events:
        raise TraceError("none of its lines is of CuPy's DebugPrintHook")


def _object(text: str) -> dict[str, Any]:
    """Parse the JSON object of a line."""
    try:
        found: dict[str, Any] = json.loads(text)
    except (ValueError, RecursionError):
        raise TraceError(f"not a whole object of JSON: {text[:60]!r}") from None
    return found


def _add(log: Log, event: dict[str, Any]) -> None:
    hook, address = event["hook"], _number(event, "mem_ptr")
    size = _number(event, "size" if hook == "malloc" and "size" in event else "mem_size")
    device = _number(event, "device_id")
    if device >= _MOST_DEVICES:
        raise TraceError(f"no device: {device}")
    if hook not in ("alloc", "malloc", "free"):
        raise TraceError(f"none of CuPy's hooks: {str(hook)[:40]!r}")
    if address == 0:  # an empty request, or no memory was obtained
        if hook == "malloc" and size > 0:
            log.refused(device, size, *_NOWHERE)
    elif hook == "alloc":
        log.reserve(device, address, size, *_NOWHERE)
    elif hook == "malloc":
        log.alloc(device, address, size, *_NOWHERE)
    else:
        log.free(device, address, size, *_NOWHERE)


def _number(event: dict[str, Any], name: str) -> int:
    value = event.get(name)
    if type(value) is not int:
        raise TraceError(f"not a number: {name} {str(value)[:40]!r}")
    return number(value, name)

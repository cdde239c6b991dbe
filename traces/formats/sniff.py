"""Recognition of file formats by content."""

from __future__ import annotations

import gzip
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from traces.errors import TraceError
from traces.files import KIND_KEY, read_schema, string_metadata
from traces.formats.cupy_hook import EVENT as CUPY_EVENT
from traces.formats.rmm_log import is_header as is_rmm_header
from traces.formats.text_files import opened

if TYPE_CHECKING:
    from _typeshed import StrPath

FileKind = Literal["trace", "plan", "csv", "snapshot", "rmm", "cupy", "chrome"]
#: Most bytes that `sniff` examines: the output of a program before its first line of CuPy's hook may be as
#: long.
_HEAD_BYTES = 1 << 16
#: A line of RMM's own log, ``RMM_DEBUG_LOG_FILE``: thread, time, level (rmm/logger.hpp).
_RMM_DEBUG = re.compile(rb"\[ *\d+\]\[\d\d:\d\d:\d\d:\d+\]\[\w+ *\] ")
_JSON = re.compile(rb'\s*(?:\{\s*"|\[\s*\{)')


def sniff(path: StrPath) -> FileKind:
    """Return the format of a file, by content.

    ``"snapshot"`` is PyTorch's, ``"rmm"`` a log of RMM, ``"cupy"`` lines of CuPy's hook and ``"chrome"`` a
    trace of PyTorch's profiler, each plain or compressed by gzip.

    Raises:
        TraceError: an unknown format, or a pipe or a device, which is not opened.
        OSError: the file cannot be opened.
    """
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise TraceError("no regular file: it is read more than once, so store it first", file=path)
    with Path(path).open("rb") as file:
        head = file.read(16)
    if not head:
        raise TraceError("the file is empty", file=path)
    if head.startswith(b"PAR1"):
        kind = string_metadata(read_schema(path), path).get(KIND_KEY)
        if kind in ("trace", "plan"):
            return "trace" if kind == "trace" else "plan"
        raise TraceError("a Parquet file, but neither a trace nor a plan", file=path)
    if _is_pickle(head):
        return "snapshot"
    if head.startswith(b"PK\3\4"):
        raise TraceError(
            "a zip file, as torch.save writes it: write the snapshot by torch.cuda.memory._dump_snapshot",
            file=path,
        )
    return _sniff_text(path)


def _is_pickle(head: bytes) -> bool:
    """Recognise a pickle by the first opcode and protocol."""
    return head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5")


def _sniff_text(path: StrPath) -> FileKind:
    with opened(path) as file:
        head = file.read(_HEAD_BYTES)
        packed = isinstance(file, gzip.GzipFile)
    if packed and _is_pickle(head):
        return "snapshot"
    line = (head.removeprefix(b"\xef\xbb\xbf").splitlines() or [b""])[0]
    if is_rmm_header(line):
        return "rmm"
    if _RMM_DEBUG.match(line):
        raise TraceError(
            "RMM's debug log, which has no addresses: log allocations by "
            "rmm.enable_logging(log_file_name=...) or rmm::mr::logging_resource_adaptor",
            file=path,
        )
    if CUPY_EVENT.search(head):
        return "cupy"
    if _JSON.match(head.removeprefix(b"\xef\xbb\xbf")):
        return "chrome"
    if not packed and b"size" in (name.strip().lower() for name in line.split(b",")):
        return "csv"
    raise TraceError(
        "neither a trace, a plan, a snapshot, a log of RMM, lines of CuPy's DebugPrintHook, "
        "a profiler's trace nor a CSV with a column 'size'",
        file=path,
    )

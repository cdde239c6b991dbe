"""Atomic writing of files, and recognition of file formats by content."""

from __future__ import annotations

import errno
import gzip
import os
import re
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from traces.cupy_hook import EVENT as CUPY_EVENT
from traces.errors import TraceError
from traces.rmm_log import is_header as is_rmm_header
from traces.text_files import opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from _typeshed import StrPath

FileKind = Literal["trace", "plan", "csv", "snapshot", "rmm", "cupy", "chrome"]
#: Metadata keys of this package's Parquet files: the kind of file, and the version of its columns.
KIND_KEY, VERSION_KEY = "mempool.kind", "mempool.version"
#: Most bytes that `sniff` examines: the output of a program before its first line of CuPy's hook may be as
#: long.
_HEAD_BYTES = 1 << 16
#: A line of RMM's own log, ``RMM_DEBUG_LOG_FILE``: thread, time, level (rmm/logger.hpp).
_RMM_DEBUG = re.compile(rb"\[ *\d+\]\[\d\d:\d\d:\d\d:\d+\]\[\w+ *\] ")
_JSON = re.compile(rb'\s*(?:\{\s*"|\[\s*\{)')


@contextmanager
def atomic(path: StrPath) -> Iterator[Path]:
    """Yield a path beside ``path`` to write to; renamed to ``path`` at the end, removed on any exception.

    A link is followed. A path that is neither a file nor absent (a pipe, ``/dev/null``) is written to
    directly. A child forked in the meantime neither renames nor removes: the file belongs to the parent.

    Raises:
        OSError: with the name ``path``: the folder is missing or not writable, or ``path`` is a folder, or
            links form a circle, or the file cannot be written to the end.
    """
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    mode = target.stat().st_mode if target.exists() else None
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "is a folder", str(path))
    if mode is not None and not stat.S_ISREG(mode):
        with _named(path, target):
            yield target
        return
    beside, pid = target.with_name(f".{os.urandom(8).hex()}.tmp"), os.getpid()
    with _named(path, beside):
        os.close(os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            yield beside
            if os.getpid() == pid:
                if mode is not None:
                    beside.chmod(stat.S_IMODE(mode))
                beside.replace(target)
        except BaseException:
            if os.getpid() == pid:
                beside.unlink(missing_ok=True)
            raise


@contextmanager
def _named(path: StrPath, written: Path) -> Iterator[None]:
    """Name ``path`` in errors of writing, which name the temporary file or, as Arrow's do, no file."""
    try:
        yield
    except OSError as error:
        if error.filename not in (None, str(written)):
            raise
        reason = os.strerror(error.errno) if error.errno else one_line(error)
        raise OSError(error.errno or errno.EIO, reason, str(path)) from error


def read_schema(path: StrPath) -> Any:
    """Return the Arrow schema of a Parquet file, from the footer.

    Raises:
        TraceError: not a Parquet file, or a damaged one.
        OSError: the file cannot be opened.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with Path(path).open("rb") as file:
        try:
            return pq.read_schema(file)
        except (pa.ArrowException, OSError, ValueError, UnicodeDecodeError) as error:
            raise TraceError(f"not a whole Parquet file ({one_line(error)})", file=path) from None


def string_metadata(schema: Any, path: StrPath | None) -> dict[str, str]:
    """Return the key-value metadata of a schema as text, without Arrow's own.

    Raises:
        TraceError: bytes that are not UTF-8.
    """
    try:
        return {key.decode(): value.decode() for key, value in (schema.metadata or {}).items()}
    except UnicodeDecodeError:
        raise TraceError("metadata is not UTF-8 text", file=path) from None


def expect(metadata: Mapping[str, str], kind: str, version: str, path: StrPath | None) -> None:
    """Check that the metadata of a Parquet file names this ``kind`` of file in the supported ``version``.

    Raises:
        TraceError: another kind or version.
    """
    if metadata.get(KIND_KEY) != kind:
        raise TraceError(f"not a {kind}, but {metadata.get(KIND_KEY, 'something else')[:40]!r}", file=path)
    if metadata.get(VERSION_KEY) != version:
        found = metadata.get(VERSION_KEY, "none")[:40]
        raise TraceError(f"a {kind} of version {found!r}; this reads version {version!r}", file=path)


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


def one_line(error: BaseException) -> str:
    """Return the message of an error, as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]

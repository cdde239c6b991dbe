"""Atomic writing of files, and the metadata of this project's Parquet files."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from _typeshed import StrPath

#: Metadata keys of this package's Parquet files: the kind of file, and the version of its columns.
KIND_KEY, VERSION_KEY = "mempool.kind", "mempool.version"


@contextmanager
def atomic(path: StrPath) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on exit, rename it to ``path``, or remove it on an error.

    Links are followed. An existing ``path`` that is no file (a pipe, ``/dev/null``) is written directly. A
    child forked in the meantime neither renames nor removes, since the file belongs to the parent.

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
    """Return a write error that names ``path`` instead of the temporary file or, with Arrow, of no file."""
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


def one_line(error: BaseException) -> str:
    """Return the message of an error, as one line of at most 200 characters."""
    return " ".join(str(error).split())[:200]

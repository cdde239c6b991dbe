"""Traces as Parquet files: plain columns that any tool reads, with event types and names as text.

The columns are those of `Trace`, with ``kind`` as "alloc", "free", ... and columns of names, such as
``operation``, as the names themselves, null where unknown. The trace's metadata is stored in the schema's
metadata, under keys that begin with ``trace.``.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import numpy as np

from traces.columns import MAX_EVENTS, PIECE_EVENTS, column
from traces.errors import TraceError
from traces.files import KIND_KEY, VERSION_KEY, atomic, expect, one_line, read_schema, string_metadata
from traces.formats.arrow import from_numpy, from_texts, to_numpy
from traces.trace import COLUMNS, NAMED, UNKNOWN, EventType, Trace
from traces.transforms import without_contradictions

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from _typeshed import StrPath
    from numpy.typing import NDArray

    from traces.formats.text_files import Head

VERSION = "1"
_PREFIX = "trace."
_KINDS = tuple(kind.name.lower() for kind in EventType)
_TEXT = ("kind", *NAMED)
#: Columns missing in files of earlier releases.
_LATER = ("address", "module", "category", "stack", "pool")


def is_trace(head: Head) -> bool:
    """Return true for a Parquet file of a trace.

    Raises:
        TraceError: a damaged Parquet file, or neither a trace nor a plan.
    """
    return _content(head) == "trace"


def is_plan(head: Head) -> bool:
    """Return true for a Parquet file of a plan, with errors as `is_trace`."""
    return _content(head) == "plan"


def _content(head: Head) -> str | None:
    if head.compressed or not head.content.startswith(b"PAR1"):
        return None
    content = string_metadata(read_schema(head.path), head.path).get(KIND_KEY)
    if content not in ("trace", "plan"):
        raise TraceError("a Parquet file, but neither a trace nor a plan")
    return content


def write_trace(trace: Trace, path: StrPath) -> None:
    """Write a trace to ``path``, whole or not at all.

    Raises:
        TraceError: the trace contradicts itself.
        OSError: the file cannot be written.
    """
    trace.validate()
    with TraceWriter(path, metadata=trace.metadata) as writer:
        writer.write(trace)


class TraceWriter:
    """Writer of a trace piece by piece in bounded memory; the file appears when the ``with`` block ends.

    An exception in the block removes the written part. Each piece may have separate names; the metadata of
    pieces is ignored, the writer's is stored.
    """

    def __init__(self, path: StrPath, *, metadata: Mapping[str, str] | None = None) -> None:
        self._path = path
        self._metadata = {KIND_KEY: "trace", VERSION_KEY: VERSION} | {
            _PREFIX + key: value for key, value in (metadata or {}).items()
        }
        self._pending: list[Any] = []
        self._rows = 0
        self._file: Any = None
        self._writer: Any = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        import pyarrow.parquet as pq

        with self._stack:
            # An open file, no name: after a failed write Arrow removes the file of that name, even a device.
            beside = self._stack.enter_context(atomic(self._path))
            self._file = self._stack.enter_context(beside.open("wb"))
            self._writer = pq.ParquetWriter(
                self._file,
                _schema(self._metadata),
                compression="zstd",
                compression_level=1,
                use_dictionary=[name for name in COLUMNS if name not in ("buffer", "time_ns", "address")],
            )
            self._stack = self._stack.pop_all()
        return self

    def write(self, piece: Trace) -> None:
        """Append events. Each row is checked in isolation, without the order of events.

        Raises:
            TraceError: a row that is impossible in itself.
        """
        piece.check_rows()
        self._pending.append(_table(piece))
        self._rows += len(piece)
        if self._rows >= PIECE_EVENTS:
            self._flush()

    def disown(self) -> None:
        """Detach a forked child's copy, and drop its rows: the file belongs to the parent."""
        if self._file is not None and not self._file.closed:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._file.fileno(), inheritable=False)
            os.close(nowhere)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        with self._stack:  # renames or removes the file
            self._stack.push(self._close)
            return self._stack.pop_all().__exit__(kind, error, trace)

    def _close(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._pending:
            table = pa.concat_tables(self._pending).unify_dictionaries()
            self._writer.write_table(table, row_group_size=PIECE_EVENTS)
            self._pending, self._rows = [], 0


def read_trace(
    path: StrPath,
    *,
    skipped: Counter[str] | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> Trace:
    """Read a trace whole, and validate the events.

    Args:
        path: the file.
        skipped: receives the counts of impossible events, which are left out, by reason; None: the first is
            an error.
        progress: called now and then with the number of events read so far and the number in the file.

    Raises:
        TraceError: naming the file: not a whole trace of this version, impossible events, or more than
            `MAX_EVENTS` events (`iter_trace` has no limit).
        OSError: the file cannot be opened.
    """
    with _opened(path) as (file, metadata):
        rows = file.metadata.num_rows
        if rows > MAX_EVENTS:
            raise TraceError(f"{rows} events are more than {MAX_EVENTS}, the most read at once", file=path)
        table = {name: np.empty(rows, dtype) for name, dtype in COLUMNS.items()}
        names: dict[str, int] = {}
        done = 0
        for batch in _batches(file):
            end = done + len(batch)
            if end > rows:
                raise TraceError("more events than the file declares", file=path)
            for name, values in _columns(batch, names).items():
                table[name][done:end] = values
            done = end
            if progress is not None:
                progress(done, rows)
        if done != rows:
            raise TraceError(f"{rows} events declared, {done} found", file=path)
        trace = Trace(**table, names=tuple(names), metadata=metadata)
        if skipped is not None:
            trace = without_contradictions(trace, skipped)
        trace.validate()
        return trace


def iter_trace(path: StrPath) -> Iterator[Trace]:
    """Yield a trace in pieces of at most `PIECE_EVENTS`, in bounded memory, each with separate names.

    A piece may free buffers of earlier pieces; rows are checked in isolation only.

    Raises:
        TraceError: naming the file, as `read_trace`; the row counts from the beginning of the file.
        OSError: the file cannot be opened.
    """
    with _opened(path) as (file, metadata):
        done = 0
        for batch in _batches(file):
            names: dict[str, int] = {}
            piece = Trace(**_columns(batch, names), names=tuple(names), metadata=metadata)
            try:
                piece.check_rows()
            except TraceError as error:
                raise TraceError(error.reason, row=done + (error.row or 0)) from None
            done += len(piece)
            yield piece


def _schema(metadata: Mapping[str, str]) -> Any:
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    types = {name: text if name in _TEXT else pa.from_numpy_dtype(dtype) for name, dtype in COLUMNS.items()}
    return pa.schema(
        [pa.field(name, kind, nullable=name in NAMED) for name, kind in types.items()],
        {_utf8(key): _utf8(value) for key, value in metadata.items()},
    )


def _utf8(text: str) -> str:
    # Source paths may contain bytes that are not UTF-8, as lone surrogates.
    return text.encode("utf-8", "backslashreplace").decode()


def _table(piece: Trace) -> Any:
    import pyarrow as pa

    table = {name: from_numpy(getattr(piece, name)) for name in COLUMNS if name not in _TEXT}
    table["kind"] = pa.DictionaryArray.from_arrays(
        from_numpy(piece.kind.astype(np.int32)), from_texts(_KINDS)
    )
    for name in NAMED:
        index = getattr(piece, name)
        used = np.flatnonzero(np.bincount(index[index >= 0], minlength=1))
        rank = np.zeros(len(piece.names) + 1, np.int32)
        rank[used[used < len(piece.names)]] = np.arange(len(used))[used < len(piece.names)]
        texts = from_texts([_utf8(piece.names[i]) for i in used if i < len(piece.names)])
        table[name] = pa.DictionaryArray.from_arrays(from_numpy(rank[index], known=index >= 0), texts)
    plain = _schema({})
    return pa.Table.from_arrays([table[name] for name in COLUMNS], schema=plain)


@contextlib.contextmanager
def _opened(path: StrPath) -> Iterator[tuple[Any, dict[str, str]]]:
    """Yield the open Parquet file and the trace's metadata; errors inside the block name the file."""
    import pyarrow as pa

    schema = read_schema(path)
    stored = string_metadata(schema, path)
    expect(stored, "trace", VERSION, path)
    metadata = {k.removeprefix(_PREFIX): v for k, v in stored.items() if k.startswith(_PREFIX)}
    with Path(path).open("rb") as raw:
        try:
            _check_schema(schema)
            yield _parquet_file(raw), metadata
        except TraceError as error:
            raise error.within(path) from None
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise TraceError(f"not a whole Parquet file ({one_line(error)})", file=path) from None


def _parquet_file(raw: BinaryIO) -> Any:
    """Open a Parquet file, whose schema may contradict the Arrow schema in its metadata."""
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(raw, read_dictionary=list(_TEXT))
    except KeyError as error:
        raise TraceError(f"not a whole Parquet file (it has no column {error})") from None
    if file.metadata.num_rows < 0:
        raise TraceError(f"not a whole Parquet file ({file.metadata.num_rows} rows)")
    return file


def _check_schema(schema: Any) -> None:
    import pyarrow as pa

    for name, dtype in COLUMNS.items():
        if name in _LATER and name not in schema.names:
            continue
        if schema.names.count(name) != 1:
            raise TraceError(f"{schema.names.count(name)} columns are called {name!r}, not one")
        found = schema.field(name).type
        if name in _TEXT:
            found = found.value_type if pa.types.is_dictionary(found) else found
        if found != (pa.string() if name in _TEXT else pa.from_numpy_dtype(dtype)):
            raise TraceError(f"column {name!r} holds {str(found)[:40]}")


def _batches(file: Any) -> Iterator[Any]:
    present = [name for name in COLUMNS if name not in _LATER or name in file.schema_arrow.names]
    yield from file.iter_batches(PIECE_EVENTS, columns=present)


def _columns(batch: Any, names: dict[str, int]) -> dict[str, NDArray[Any]]:
    """Return a batch as the columns of a trace, and add new names to ``names``."""
    result = {}
    for name, dtype in COLUMNS.items():
        if name in _LATER and name not in batch.schema.names:
            result[name] = column(UNKNOWN[name], dtype, name, len(batch))
            continue
        values = batch.column(name)
        if name not in NAMED and values.null_count:
            raise TraceError(f"column {name!r} has empty fields")
        if name not in _TEXT:
            result[name] = column(to_numpy(values), dtype, name)
            continue
        texts = values.dictionary.to_pylist()
        if name == "kind":
            index = [_KINDS.index(text) if text in _KINDS else 255 for text in texts]
        else:
            index = [-1 if text is None else names.setdefault(text, len(names)) for text in texts]
        chosen = to_numpy(values.indices.fill_null(-1))
        if chosen.size and (chosen.min() < -1 or chosen.max() >= len(index)):
            raise TraceError(f"column {name!r} points beyond its dictionary")
        result[name] = np.array([*index, -1], np.int32)[chosen].astype(dtype)  # -1, null, is the last
    return result

"""Plan files in Parquet format: one row per buffer with lifetime and offsets.

The columns are those of `Buffers`, with the fixed offset as ``fixed`` and the gaps as the lists ``gap_start``
and ``gap_end``; ``offset`` lists the plan's offsets, one for each of U iterations. The plan's scalars are in
the schema metadata, under keys that begin with ``plan.``.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from solvers.errors import PlanError
from solvers.packing.plan import Plan, Status
from solvers.packing.solve import MOST_INSTANCES
from traces.buffers import Buffers
from traces.errors import TraceError
from traces.files import KIND_KEY, VERSION_KEY, atomic, expect, one_line, string_metadata
from traces.formats.arrow import from_numpy, from_texts, to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO

    from _typeshed import StrPath
    from numpy.typing import NDArray

T = TypeVar("T")
VERSION = "1"
#: Largest number of buffers that `read_plan` accepts: a small compressed file can contain any number of equal
#: rows.
MAX_BUFFERS = 1 << 24
_NUMBERS = ("start", "end", "size", "alignment", "group", "stream")
_LISTS = ("gap_start", "gap_end", "offset")
_PLAN, _EXTRA, _ARRAY = "plan.", "extra.", "array."
_DTYPES = ("bool", "uint8", "int32", "int64", "uint64", "float64")


def write_plan(
    plan: Plan,
    buffers: Buffers,
    path: StrPath | BinaryIO,
    *,
    extra: Mapping[str, str] | None = None,
    extra_columns: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """Write a plan and its buffers; write atomically to a file given by name.

    Args:
        plan: the plan, with offsets.
        buffers: the buffers of the plan, in the same number.
        path: the file name, or a binary file open for writing.
        extra: additional text by key; `read_plan` returns this text.
        extra_columns: one-dimensional arrays of any length, of bool, uint8, int32, int64, uint64 or float64;
            `read_plan_columns` returns these arrays.

    Raises:
        PlanError: no offsets, a wrong number of offsets, or an array of another type or shape.
        OSError: the file cannot be written.
    """
    import pyarrow.parquet as pq

    if plan.offset is None or len(plan.offset) != len(buffers):
        raise PlanError("there are no offsets to write, or not for these buffers")
    metadata = {KIND_KEY: "plan", VERSION_KEY: VERSION, **_scalars(plan)}
    metadata |= {_EXTRA + key: value for key, value in (extra or {}).items()}
    metadata |= {_ARRAY + key: _text_of(key, value) for key, value in (extra_columns or {}).items()}
    table = _table(plan.offset, buffers).replace_schema_metadata(metadata)
    with _opened_for_writing(path) as file:
        pq.write_table(table, file, compression="zstd")


def read_plan(path: StrPath | BinaryIO) -> tuple[Plan, Buffers, dict[str, str]]:
    """Read a plan, the plan's buffers, and the ``extra`` text stored in the file.

    The file, named or open, is untrusted: call `check` to decide whether the plan is valid.

    Raises:
        PlanError: the plan's values are invalid; the message names the file.
        TraceError: not a complete plan file of a known version, or impossible buffers; the message names the
            file.
        OSError: the file cannot be opened.
    """
    with _opened(path) as (file, metadata):
        values = {k.removeprefix(_PLAN): v for k, v in metadata.items() if k.startswith(_PLAN)}
        if file.metadata.num_rows > MAX_BUFFERS:
            raise PlanError(f"{file.metadata.num_rows} buffers are more than {MAX_BUFFERS}")
        table = _read(file)
        period = _number(values, "period", lambda text: int(text) if text else None)
        buffers = _buffers(table, period)
        plan = Plan(
            _offsets(table),
            _number(values, "arena_bytes", int),
            _number(values, "lower_bound_bytes", int),
            _number(values, "status", Status),
            values.get("solver", ""),
            _number(values, "seed", int),
            _number(values, "seconds", float),
            values.get("stopped_by", ""),
            period,
            nodes=_number({"nodes": "0"} | values, "nodes", int),
        )
        return plan, buffers, {k.removeprefix(_EXTRA): v for k, v in metadata.items() if k.startswith(_EXTRA)}


def read_plan_columns(path: StrPath | BinaryIO) -> dict[str, NDArray[Any]]:
    """Read the arrays that were stored with a plan as ``extra_columns``.

    Raises:
        PlanError: an array is damaged; the message names the file.
        TraceError: as `read_plan`.
        OSError: the file cannot be opened.
    """
    with _opened(path) as (_, metadata):
        return {
            key.removeprefix(_ARRAY): _array_of(key, text)
            for key, text in metadata.items()
            if key.startswith(_ARRAY)
        }


def _scalars(plan: Plan) -> dict[str, str]:
    values = {
        "arena_bytes": plan.arena_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "status": plan.status,
        "solver": plan.solver,
        "seed": plan.seed,
        "seconds": plan.seconds,
        "nodes": plan.nodes,
        "stopped_by": plan.stopped_by,
        "period": "" if plan.period is None else plan.period,
    }
    return {_PLAN + key: str(value) for key, value in values.items()}


def _table(offset: NDArray[np.int64], buffers: Buffers) -> Any:
    import pyarrow as pa

    gaps = np.bincount(buffers.gap_buffer, minlength=len(buffers))
    columns = np.full(len(buffers), offset.shape[1])

    def lists(counts: NDArray[np.int64], values: NDArray[np.int64]) -> Any:
        ends = from_numpy(np.append(0, np.cumsum(counts)).astype(np.int32))
        return pa.ListArray.from_arrays(ends, from_numpy(values))

    table = {name: from_numpy(getattr(buffers, name)) for name in (*_NUMBERS, "persistent")}
    table["fixed"] = from_numpy(buffers.offset)
    table["gap_start"] = lists(gaps, buffers.gap_start)
    table["gap_end"] = lists(gaps, buffers.gap_end)
    table["offset"] = lists(columns, offset.ravel())
    if buffers.ids is not None:
        table["id"] = from_texts(buffers.ids)
    return pa.Table.from_arrays(list(table.values()), names=list(table))


@contextlib.contextmanager
def _opened_for_writing(path: StrPath | BinaryIO) -> Iterator[BinaryIO]:
    if not isinstance(path, str | os.PathLike):
        yield path
        return
    with (
        atomic(path) as temporary,
        temporary.open("wb") as file,
    ):  # not by name, see `traces.formats.parquet.TraceWriter`
        yield file


@contextlib.contextmanager
def _opened(path: StrPath | BinaryIO) -> Iterator[tuple[Any, dict[str, str]]]:
    """Open a Parquet file, and yield the file and its metadata; errors inside the block name the file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    named = path if isinstance(path, str | os.PathLike) else None
    with contextlib.nullcontext(path) if named is None else Path(named).open("rb") as raw:
        try:
            file = pq.ParquetFile(raw)
            metadata = string_metadata(file.schema_arrow, named)
            expect(metadata, "plan", VERSION, named)
            yield file, metadata
        except TraceError as error:
            raise error if named is None else error.within(named) from None
        except PlanError as error:
            raise error if named is None else PlanError(f"{Path(named)}: {error}") from None
        except (pa.ArrowException, OSError, ValueError) as error:
            raise TraceError(f"not a whole Parquet file ({one_line(error)})", file=named) from None


def _read(file: Any) -> Any:
    """Read the table and check the required columns and types."""
    import pyarrow as pa

    schema = file.schema_arrow
    wanted = {name: pa.int64() for name in (*_NUMBERS, "fixed")} | {"persistent": pa.bool_()}
    wanted |= {name: pa.list_(pa.int64()) for name in _LISTS}
    if "id" in schema.names:
        wanted["id"] = pa.string()
    for name, column_type in wanted.items():
        if schema.names.count(name) != 1:
            raise PlanError(f"{schema.names.count(name)} columns are called {name!r}, not one")
        actual = schema.field(name).type
        if not (
            actual == column_type
            or (name in _LISTS and pa.types.is_list(actual) and actual.value_type == pa.int64())
        ):
            raise PlanError(f"column {name!r} holds {str(actual)[:40]}")
    batches, rows, values = [], 0, 0
    for batch in file.iter_batches(1 << 14, columns=list(wanted)):
        rows += len(batch)
        values += sum(len(batch.column(name).flatten()) for name in _LISTS)
        if rows > MAX_BUFFERS or values > 4 * MAX_BUFFERS:
            raise PlanError("more rows or list elements than any plan has")
        if any(column.null_count for column in batch.columns):
            raise PlanError("a column has empty fields")
        batches.append(batch)
    return pa.Table.from_batches(batches, pa.schema([schema.field(name) for name in wanted]))


def _flat(table: Any, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the lengths and the values of a column of lists."""
    import pyarrow.compute as pc

    values = pc.list_flatten(table.column(name))
    if values.null_count:
        raise PlanError(f"column {name!r} has empty fields")
    counts = pc.list_value_length(table.column(name))
    return to_numpy(counts).astype(np.int64), to_numpy(values)


def _buffers(table: Any, period: int | None) -> Buffers:
    starts, gap_start = _flat(table, "gap_start")
    ends, gap_end = _flat(table, "gap_end")
    if (starts != ends).any():
        raise PlanError("a gap without a start or an end")
    return Buffers(
        **{name: to_numpy(table.column(name)) for name in (*_NUMBERS, "persistent")},
        offset=to_numpy(table.column("fixed")),
        gap_buffer=np.repeat(np.arange(len(starts)), starts),
        gap_start=gap_start,
        gap_end=gap_end,
        ids=tuple(table.column("id").to_pylist()) if "id" in table.column_names else None,
        period=period,
    )


def _offsets(table: Any) -> NDArray[np.int64]:
    counts, values = _flat(table, "offset")
    columns = int(counts[0]) if len(counts) else 1
    if (counts != columns).any() or not 1 <= columns <= MOST_INSTANCES:
        raise PlanError(f"buffers have {counts.min()} to {counts.max()} offsets")
    return values.reshape(-1, columns)


def _number(values: Mapping[str, str], key: str, parse: Callable[[str], T]) -> T:
    text = values.get(key, "missing")
    try:
        if len(text) > 40:
            raise ValueError
        return parse(text)
    except ValueError:
        raise PlanError(f"its {key} is {text[:40]!r}") from None


def _text_of(name: str, values: NDArray[Any]) -> str:
    array = np.ascontiguousarray(values)
    if array.ndim != 1 or array.dtype.name not in _DTYPES:
        raise PlanError(f"array {name!r} of {array.dtype} with {array.ndim} dimensions cannot be stored")
    little = array.astype(array.dtype.newbyteorder("<"))
    return f"{array.dtype.name}:{base64.b64encode(little.tobytes()).decode()}"


def _array_of(name: str, text: str) -> NDArray[Any]:
    dtype, colon, data = text.partition(":")
    try:
        if dtype not in _DTYPES or not colon:
            raise ValueError
        raw = base64.b64decode(data, validate=True)
        return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).astype(dtype)
    except (ValueError, binascii.Error):
        raise PlanError(f"{name!r} is not an array") from None

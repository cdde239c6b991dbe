"""Read-only one-dimensional NumPy columns, shared by the tables of this package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from traces.errors import TraceError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

#: Largest size, time or offset: the sum of two still fits int64.
LARGEST = 2**62
#: Rows of a piece of a streamed trace, of which memory holds one at a time.
PIECE_EVENTS = 1 << 17
#: Most events of a trace that is read whole: a compressed file of a few kilobytes can contain any number of
#: equal rows.
MAX_EVENTS = 1 << 26
#: Upper bound of thread indices, which are dense, so that a larger index is invalid.
MOST_THREADS = 1 << 20


def column(values: Any, dtype: DTypeLike, name: str, length: int | None = None) -> NDArray[Any]:
    """Return ``values`` as a read-only 1-D array of ``dtype``; a scalar is repeated ``length`` times.

    A writable array is viewed, not copied: the caller must not write to the array afterwards. The
    repetitions of a scalar share the memory of one value.

    Raises:
        TraceError: another shape or length, or values that ``dtype`` cannot hold exactly.
    """
    given = np.asarray(values)
    if given.size == 0 and given.dtype == np.float64:  # np.asarray([]) defaults to float64
        given = given.astype(dtype)
    if given.ndim == 0 and length is not None:
        given = np.broadcast_to(_cast(given.reshape(1), np.dtype(dtype), name), length)
    if given.ndim != 1:
        raise TraceError(f"column {name} has {given.ndim} dimensions, not one")
    if length is not None and len(given) != length:
        raise TraceError(f"column {name} has {len(given)} rows, not {length}")
    result = _cast(given, np.dtype(dtype), name).view()
    result.flags.writeable = False
    return result


def _cast(given: NDArray[Any], dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    if given.dtype == dtype:
        return given if given.strides == (0,) else np.ascontiguousarray(given)
    if given.dtype.kind not in "biu" or (dtype.kind == "b" and given.dtype.kind != "b"):
        raise TraceError(f"column {name} holds {given.dtype}, not {dtype}")
    result = given.astype(dtype)
    if dtype.kind != "b" and given.size:
        lost = (result != given) | ((result < 0) != (given < 0))
        if lost.any():
            row = int(lost.argmax())
            raise TraceError(f"column {name}: {given[row]} does not fit {dtype}", row=row)
    return result


def first_fault(faults: list[tuple[NDArray[np.bool_], str]]) -> tuple[int, str] | None:
    """Return the row and the reason of the earliest fault; of several reasons in a row, the first listed."""
    found = [(int(mask.argmax()), reason) for mask, reason in faults if mask.any()]
    return min(found, key=lambda fault: fault[0]) if found else None


def power_of_two(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return a mask of the ``values`` that are 1, 2, 4, ..."""
    result: NDArray[np.bool_] = (values >= 1) & ((values & (values - 1)) == 0)
    return result


def distinct(values: NDArray[Any]) -> NDArray[Any]:
    """Return the distinct values in ascending order, as ``np.unique``, without an import of ``numpy.ma``.

    The planner calls this function in users' programs, where the import would take time and memory. The
    starts and ends of a trace's buffers are a few sorted runs, which a stable sort merges quickly.
    """
    ordered = np.sort(values, axis=None, kind="stable")
    result: NDArray[Any] = ordered[_firsts(ordered)]
    return result


def numbered(values: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct values in order, and for each value its index among them, in the same shape."""
    flat = values.ravel()
    order = np.argsort(flat, kind="stable")
    ordered = flat[order]
    first = _firsts(ordered)
    number = np.empty(len(flat), np.int64)
    number[order] = np.cumsum(first) - 1
    return ordered[first], number.reshape(values.shape)


def _firsts(ordered: NDArray[Any]) -> NDArray[np.bool_]:
    """Return a mask of the sorted values that differ from their predecessor."""
    return np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]

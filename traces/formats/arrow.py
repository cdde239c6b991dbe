"""Conversion between NumPy columns and Arrow arrays through their buffers, without pandas.

``pyarrow.array`` and ``Array.to_numpy`` import pandas if installed. The pool runs in users' programs, where
that import would take time and memory, and would change later allocations (for example by loading
``numpy.random`` early). The import also fails while the interpreter shuts down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def from_numpy(values: NDArray[Any], known: NDArray[np.bool_] | None = None) -> Any:
    """Return a column of numbers or booleans as an Arrow array; null where not known."""
    import pyarrow as pa

    kind, length = pa.from_numpy_dtype(values.dtype), len(values)
    if values.dtype == np.bool_:
        values = np.packbits(values, bitorder="little")
    bits = None if known is None else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, length, [bits, pa.py_buffer(np.ascontiguousarray(values))])


def from_texts(texts: Sequence[str]) -> Any:
    """Return an Arrow array of strings."""
    import pyarrow as pa

    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def to_numpy(values: Any) -> NDArray[Any]:
    """Return a null-free Arrow array, plain or chunked, of numbers or booleans as a NumPy array."""
    import pyarrow as pa

    pieces = [_piece(piece) for piece in (values.chunks if isinstance(values, pa.ChunkedArray) else [values])]
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, dtype_of(values.type)), *pieces])


def dtype_of(kind: Any) -> np.dtype[Any]:
    """Return the NumPy type of the values of an Arrow type of numbers or booleans."""
    name = str(kind)  # to_pandas_dtype() imports pandas in older versions
    return np.dtype({"float": "float32", "double": "float64"}.get(name, name))


def _piece(values: Any) -> NDArray[Any]:
    dtype, begin, end = dtype_of(values.type), values.offset, values.offset + len(values)
    data = values.buffers()[1]
    if data is None:
        return np.empty(0, dtype)
    if dtype == np.bool_:
        return np.unpackbits(np.frombuffer(data, np.uint8), count=end, bitorder="little")[begin:].astype(
            dtype
        )
    return np.frombuffer(data, dtype, count=end)[begin:]

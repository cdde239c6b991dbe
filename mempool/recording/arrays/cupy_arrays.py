"""Watched arrays of CuPy."""

from __future__ import annotations

from typing import Any

import cupy

from mempool.recording.arrays import active_recorder
from mempool.recording.arrays.numpy_arrays import escape, method, raw
from mempool.recording.arrays.operands import enlist, name_of
from mempool.recording.arrays.rules import Rule, rule_of


class RecordedArray(cupy.ndarray):  # type: ignore[misc, unused-ignore]
    """An array of CuPy that reports operations to the recorder.

    Elementwise kernels and ufuncs call the array's override in every case; reductions, products and other
    functions of CuPy are recorded if called as methods, by NumPy's name or through `ArrayRecorder.module`.
    """

    plain_class = cupy.ndarray

    def __cupy_override_elementwise_kernel__(self, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        # The arguments behind the inputs are written.
        outputs = Rule(writes=tuple((at, "") for at in range(kernel.nin, len(args))))
        return active_recorder.operate(name_of(kernel).removeprefix("cupy_"), kernel, args, kwargs, outputs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        return active_recorder.operate(name, func, args, kwargs, rule_of(name))

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view as CuPy does; a view of another class is not watched."""
        result = cupy.ndarray.view(self, *args, **kwargs)
        if not isinstance(result, RecordedArray):
            escape(self)
        return result


#: Methods that are operations, besides those with plain names; other operators are kernels.
_SPECIAL = (
    "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__",
    "__getitem__", "__imatmul__", "__index__", "__int__", "__matmul__", "__reduce__", "__repr__",
    "__rmatmul__", "__setitem__", "__str__",
)  # fmt: skip
#: Attributes that expose the raw memory.
_RAW = ("data", "flat", "cstruct", "__cuda_array_interface__")


def _is_method(name: str) -> bool:
    return (
        not name.startswith("_")
        and name != "view"
        and name not in _RAW
        and callable(getattr(cupy.ndarray, name))
    )


for _name in (*filter(_is_method, dir(cupy.ndarray)), *_SPECIAL):
    if hasattr(cupy.ndarray, _name) and _name not in RecordedArray.__dict__:
        setattr(RecordedArray, _name, method(getattr(cupy.ndarray, _name), _name))
for _name in _RAW:
    if hasattr(cupy.ndarray, _name):
        setattr(RecordedArray, _name, raw(cupy.ndarray, _name))
enlist(RecordedArray, cupy.ndarray)

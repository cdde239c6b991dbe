"""Watched arrays of NumPy."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool.recording.arrays import active_recorder
from mempool.recording.arrays.operands import arrays_in, enlist, name_of
from mempool.recording.arrays.rows import root_of
from mempool.recording.arrays.rules import METHODS, PLAIN, rule_of

if TYPE_CHECKING:
    from collections.abc import Callable


class RecordedArray(np.ndarray[Any, Any]):
    """An array of NumPy that reports operations to the recorder, and gives the same results.

    Results of operations are of this class too while the recorder is active, afterwards of NumPy's own
    class.
    """

    plain_class = np.ndarray

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        call = ufunc if method == "__call__" else getattr(ufunc, method)
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        return active_recorder.operate(name, call, inputs, kwargs, rule_of(method))

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        name = name_of(func)
        return active_recorder.operate(name, func, args, kwargs, rule_of(name))

    def __getitem__(self, key: Any) -> Any:
        result = np.ndarray.__getitem__(self, key)
        recorder = active_recorder.recorder
        if recorder is not None and not (type(result) is RecordedArray and root_of(result) is root_of(self)):
            recorder.note("__getitem__", [self, *arrays_in(key)], result)
        return result

    def __setitem__(self, key: Any, value: Any) -> None:
        call: Callable[..., Any] = np.ndarray.__setitem__
        given: tuple[Any, ...] = (self, key, value)
        if self.dtype.hasobject:  # which stores the given object itself
            call, given = (lambda array, at: np.ndarray.__setitem__(array, at, value)), (self, key)
        active_recorder.operate("__setitem__", call, given, {}, METHODS["__setitem__"])

    def view(self, *args: Any, **kwargs: Any) -> Any:
        """Return a view as NumPy does; a view of another class is not watched."""
        result = np.ndarray.view(self, *args, **kwargs)
        if not isinstance(result, RecordedArray):
            escape(self)
        return result

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        escape(self)
        return np.ndarray.__array__(self.view(np.ndarray), *args, **kwargs)


#: Methods that are operations, besides those with plain names.
_SPECIAL = (
    "__bool__", "__complex__", "__contains__", "__copy__", "__deepcopy__", "__float__", "__format__",
    "__index__", "__int__", "__reduce__", "__reduce_ex__", "__repr__", "__str__",
)  # fmt: skip
#: Attributes that expose the raw memory.
_RAW = ("data", "ctypes", "flat", "__array_interface__", "__array_struct__")
_NOT_RECORDED = ("setflags", "view")


def escape(array: Any) -> None:
    """Report to the recorder that the raw memory of an array is exposed."""
    if active_recorder.recorder is not None:
        active_recorder.recorder.escape(array)


def watch_masked(array: Any, watch: Callable[[Any], Any]) -> Any:
    """Return a masked array over watched data and the same mask."""
    return np.ma.MaskedArray(
        watch(array.data), mask=array.mask, fill_value=array.fill_value, hard_mask=array.hardmask, copy=False
    )


def method(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return a recorded version of an array method."""
    rule = METHODS.get(name, PLAIN)

    @functools.wraps(plain)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        return active_recorder.operate(name, plain, (self, *args), kwargs, rule)

    return recorded


def raw(library: type, name: str) -> property:
    """Return a property that reports an escape, for an attribute that exposes the raw memory."""
    plain: Any = getattr(library, name)

    def get(self: Any) -> Any:
        escape(self)
        return plain.__get__(self)

    return property(get, _setter(library, name))


def _setter(library: type, name: str) -> Callable[[Any, Any], None]:
    plain: Any = getattr(library, name)

    def put(self: Any, value: Any) -> None:
        active_recorder.operate(name, plain.__set__, (self, value), {}, METHODS["__setitem__"])

    return put


def _is_method(name: str) -> bool:
    return not name.startswith("_") and name not in _NOT_RECORDED and callable(getattr(np.ndarray, name))


for _name in (*filter(_is_method, dir(np.ndarray)), *_SPECIAL):
    if _name not in RecordedArray.__dict__:
        setattr(RecordedArray, _name, method(getattr(np.ndarray, _name), _name))
for _name in _RAW:
    setattr(RecordedArray, _name, raw(np.ndarray, _name))
for _name in ("real", "imag"):
    setattr(RecordedArray, _name, property(getattr(np.ndarray, _name).__get__, _setter(np.ndarray, _name)))
enlist(RecordedArray, np.ndarray)

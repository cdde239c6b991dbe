"""Recording of CuPy's arrays: real classes of CuPy on addresses without memory, and stand-in kernels."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from mempool.recording.arrays import ArrayRecorder  # noqa: E402
from traces import EventType, Trace  # noqa: E402

LETTERS = {EventType.ALLOC: "A", EventType.FREE: "F", EventType.READ: "R", EventType.WRITE: "W"}


class Fake(cupy.cuda.memory.BaseMemory):
    """Memory with an address and without bytes."""

    addresses = itertools.count(1 << 40, 1 << 20)

    def __init__(self, size: int) -> None:
        self.ptr, self.size, self.device_id = next(self.addresses), size, 0


@pytest.fixture(autouse=True)
def _on_no_device() -> Iterator[None]:
    before = cupy.cuda.get_allocator()
    cupy.cuda.set_allocator(lambda size: cupy.cuda.memory.MemoryPointer(Fake(size), 0))
    yield
    cupy.cuda.set_allocator(before)


class Standing(ArrayRecorder):
    """Stand-in for a GPU: returns a given output, a view, or a new array of the operands' shape."""

    def operation(
        self, name: str, call: Any, args: Any, kwargs: Any, rule: Any, also: Any = frozenset()
    ) -> Any:
        return super().operation(name, lambda *a, **k: self.done(name, call, a, k), args, kwargs, rule, also)

    def done(self, name: str, call: Any, args: Any, kwargs: Any) -> Any:
        if name in ("reshape", "transpose", "empty", "ravel"):
            return call(*args, **kwargs)
        if name in ("fill", "__setitem__", "kernel"):
            return None
        given = kwargs.get("out")
        if given is None and len(args) > getattr(call, "nin", len(args)):
            given = args[call.nin]
        if given is not None:
            return given
        if name in ("item", "__float__"):
            return 0.0
        return cupy.ndarray(np.broadcast_shapes(*(one.shape for one in args if hasattr(one, "shape"))), "f4")


def events(trace: Trace) -> list[tuple[str, int, str]]:
    trace.validate()
    names = (*trace.names, "")
    rows = zip(trace.kind.tolist(), trace.buffer.tolist(), trace.operation.tolist(), strict=True)
    return [(LETTERS[EventType(kind)], buffer, names[operation]) for kind, buffer, operation in rows]


def arrays(recorder: ArrayRecorder, count: int = 1) -> list[Any]:
    return [recorder.watch(cupy.ndarray((4, 4), "f4")) for _ in range(count)]


def after(work: Any, count: int = 2) -> list[tuple[str, int, str]]:
    """Return the events recorded of some work on a number of arrays, without their first events."""
    with Standing() as recorder:
        given = arrays(recorder, count)
        kept = work(recorder, *given)
        found = events(recorder.trace())
        del kept
    return found[count:]


MAKES = [("A", 2, "add"), ("R", 0, "add"), ("R", 1, "add"), ("W", 2, "add")]


@pytest.mark.parametrize(
    "work",
    [
        lambda _, x, y: x + y,
        lambda _, x, y: cupy.add(x, y),
        lambda _, x, y: np.add(x, y),
        lambda _, x, y: x.view(cupy.ndarray) + y,
        lambda recorder, x, y: recorder.module(cupy).add(x, y),
    ],
)
def test_ufuncs_are_recorded_however_called(work: Any) -> None:
    assert [event for event in after(work) if event[2] != "escape"] == MAKES


def test_in_place_and_out_operands_are_writes() -> None:
    assert after(lambda _, x, y: x.__iadd__(y)) == [("R", 0, "add"), ("R", 1, "add"), ("W", 0, "add")]
    assert after(lambda _, x, y: cupy.exp(x, out=y))[:2] == [("R", 0, "exp"), ("W", 1, "exp")]
    assert after(lambda _, x, y: cupy.exp(x, y))[:2] == [("R", 0, "exp"), ("W", 1, "exp")]


def test_elementwise_kernels_are_recorded_by_their_arguments() -> None:
    kernel = cupy.ElementwiseKernel("T x", "T y", "y = x", "twice")
    assert after(lambda _, x, y: kernel(x, y))[:2] == [("R", 0, "twice"), ("W", 1, "twice")]
    assert [event[0] for event in after(lambda _, x, y: kernel(x))] == ["A", "R", "W"]


def test_declared_raw_kernel_is_recorded() -> None:
    def kernel(grid: Any, block: Any, given: Any) -> None:
        assert all(type(one) is cupy.ndarray for one in given)

    def work(recorder: ArrayRecorder, x: Any, y: Any) -> None:
        recorder.calls(kernel, writes=[1])((1,), (1,), (x, y))

    assert after(work) == [("R", 0, "kernel"), ("R", 1, "kernel"), ("W", 1, "kernel")]


def test_methods_and_functions_calling_methods_are_recorded() -> None:
    for work in (lambda _, x: x.sum(), lambda _, x: cupy.sum(x), lambda _, x: np.sum(x)):
        assert after(work, 1)[1:] == [("R", 0, "sum"), ("W", 1, "sum")]
    assert after(lambda _, x, y: x @ y) == [(kind, at, "__matmul__") for kind, at, _ in MAKES]
    assert after(lambda _, x: x.fill(1), 1) == [("W", 0, "fill")]
    assert after(lambda _, x: x.__setitem__(0, 1), 1) == [("W", 0, "__setitem__")]


def test_views_share_the_buffer_and_touch_nothing() -> None:
    with Standing() as recorder:
        (x,) = arrays(recorder)
        views = x.T, x.reshape(2, 8), x.ravel()
        assert {type(view) for view in views} == {type(x)}
        del x
        assert events(recorder.trace()) == [("A", 0, "")]
        del views
        assert events(recorder.trace())[-1] == ("F", 0, "")


def test_arrays_over_a_common_allocation_share_a_buffer() -> None:
    with Standing() as recorder:
        plain = cupy.ndarray((8,), "f4")
        other = cupy.ndarray((4,), "f4", memptr=plain.data + 16)
        one, two = recorder.watch(plain), recorder.watch(other)
        del plain, one
        gc.collect()
        assert events(recorder.trace()) == [("A", 0, "")]
        del other, two
        gc.collect()
        assert [event[:2] for event in events(recorder.trace())] == [("A", 0), ("F", 0)]
    assert recorder.trace().metadata["framework"] == "cupy"
    assert recorder.trace().alignment == 512


def test_taking_the_pointer_is_an_escape() -> None:
    with Standing() as recorder:
        (x,) = arrays(recorder)
        assert x.data.ptr >= 1 << 40
        assert recorder.escaped == 1

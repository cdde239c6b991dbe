"""Recorder of the operations on watched arrays."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from mempool.recording.arrays import active_recorder, numpy_arrays
from mempool.recording.arrays.operands import CLASSES, Operands, arrays_in, is_array
from mempool.recording.arrays.patches import Conversions, Function, Module
from mempool.recording.arrays.rows import FIELDS, Rows
from mempool.recording.arrays.rules import PLAIN, Rule
from traces.trace import EventType, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType, TracebackType

#: Positions of arrays among arguments; None: all of them.
Also = frozenset[int] | None
NONE: frozenset[int] = frozenset()


class ArrayRecorder:
    """Recorder of one trace while the ``with`` block runs, for all threads; one recorder at a time.

    A buffer is the memory of the array that owns this memory, and lives as long; views share the buffer. An
    operation is a read or write of each buffer that it touches; an operation that only makes views touches
    nothing. Events are added at the end of their operation: first allocs, then reads, then writes. All have
    one time, the beginning of the operation.
    """

    def __init__(self, *, frames: bool = False) -> None:
        """Make a recorder, which records nothing before the block begins.

        Args:
            frames: keep the program's source line of each event, which costs about a microsecond each.
        """
        self._rows = Rows(frames=frames)
        self._categories: dict[int, str] = {}
        self._escaped: set[int] = set()
        self._conversions = Conversions()
        self._frameworks: set[str] = set()

    # --- user interface

    def __enter__(self) -> Self:
        active_recorder.enter(self)
        self._conversions.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversions.end()
        active_recorder.leave()
        self._rows.close()

    def leave_to_the_parent(self) -> None:
        """Stop recording in a forked child."""
        self._conversions.end()
        self._rows.leave_to_the_parent()

    def watch(self, arrays: Any) -> Any:
        """Return watched versions of the arrays: views of a subclass of their own class.

        Args:
            arrays: an array of NumPy or CuPy, or a list, tuple or dict of such; other values inside stay as
                they are. Masked arrays are watched in their data and mask.

        Raises:
            TypeError: an array of another subclass, which would lose special methods.
        """
        if isinstance(arrays, (list, tuple)):
            watched = [self.watch(one) for one in arrays]
            return type(arrays)(*watched) if hasattr(arrays, "_fields") else type(arrays)(watched)
        if isinstance(arrays, dict):
            return {key: self.watch(one) for key, one in arrays.items()}
        if isinstance(arrays, np.ma.MaskedArray):
            return numpy_arrays.watch_masked(arrays, self.watch)
        self._know_library_of(arrays)
        if not is_array(arrays) or type(arrays) in CLASSES.values():
            return arrays
        library = np.ndarray if isinstance(arrays, np.memmap) else type(arrays)
        if library not in CLASSES:
            raise TypeError(f"a {library.__name__} cannot be watched; its plain array can")
        self._rows.buffer(arrays)
        return library.view(arrays, CLASSES[library])

    def own(self, category: str, arrays: Any) -> None:
        """Declare the role of some arrays' buffers in the program, such as "parameters".

        Args:
            category: the role.
            arrays: an array, or a list, tuple or dict of arrays, watched or not.
        """
        for one in arrays_in(_listed(arrays)):
            self._categories[self._rows.buffer(one)] = category

    def mark(self, name: str) -> None:
        """Mark the beginning of a phase, such as "forward"."""
        self._rows.mark(name)

    def step(self) -> None:
        """Mark the end of an iteration and the start of the next; with a pool, the pool's ``step`` does."""
        self._rows.mark("step")

    def touch(self, arrays: Any, *, read: bool = True, write: bool = False, name: str = "touch") -> None:
        """Declare an access that the recorder cannot observe, by C code or through a plain view.

        Args:
            arrays: one array or several, watched or not.
            read: the arrays were read.
            write: the arrays were written.
            name: of the operation.
        """
        found = arrays_in(_listed(arrays))
        self._note(name, time.monotonic_ns(), found if read else [], found if write else [], None, PLAIN)

    def calls(self, function: Callable[..., Any], writes: Iterable[int] | None = None) -> Callable[..., Any]:
        """Return a recorded version of a function that accesses plain arrays: C code or a CuPy kernel.

        Args:
            function: is called with plain arrays in place of watched ones; arrays in the result are watched.
            writes: positions of the written arrays among all array arguments, counted from 0; None: all may
                be written.

        Returns:
            A function that reads all array arguments.
        """
        return Function(function, also=None if writes is None else frozenset(writes))

    def module(self, module: ModuleType) -> Any:
        """Return NumPy, CuPy or a similar module with recorded functions, whatever arrays they get.

        Arrays made by these functions are watched, random numbers too. For programs that take their array
        module as a value, ``xp``, and for CuPy, many of whose functions report no calls otherwise.
        """
        self._know_library_of(getattr(module, "ndarray", None))
        return Module(module)

    @property
    def escaped(self) -> int:
        """Number of buffers of watched arrays of which a plain view is known to have been taken."""
        return len(self._escaped)

    def trace(self) -> Trace:
        """Return the trace recorded so far."""
        return self._trace(self._table())

    # --- for watched arrays

    def operation(
        self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, rule: Rule, also: Also = NONE
    ) -> Any:
        """Perform an operation on plain arrays, record the call, and return the result with watched arrays.

        Args:
            name: of the operation.
            call: the operation's function.
            args: positional arguments.
            kwargs: keyword arguments.
            rule: the operation's difference from the default.
            also: positions of further written arrays among the arrays in the arguments, counted from 0; None:
                all.
        """
        operands = Operands()
        args, kwargs = operands.plain(args), operands.plain(kwargs)
        written, unread = rule.written(args, kwargs)
        if kwargs and kwargs.get("out") is not None:
            written.append(kwargs["out"])
            unread.append(kwargs["out"])
        if also is None or also:
            written += [one for at, one in enumerate(operands.arrays) if also is None or at in also]
        began, result, writes = time.monotonic_ns(), None, []
        try:
            result = call(*args, **kwargs)
        finally:  # an operation that raises may have written as well
            if _is_array_of(result, args) and not any(result is one for one in arrays_in(unread)):
                written.append(result)  # `out` passed by position
                unread.append(result)
            reads = [] if rule.metadata else _without(operands.arrays, unread)
            writes = arrays_in(written)
            self._note(name, began, reads, writes, result, rule)
        return self.watched(operands, result, writes)

    def escape(self, array: Any) -> None:
        """Record a plain view of a watched array: accesses through this view are not recorded."""
        buffer = self._rows.buffer(array)
        self._escaped.add(buffer)
        now = time.monotonic_ns()
        self._rows.accesses([buffer], [], self._rows.name("escape"), now, now)

    def _note(
        self, name: str, began: int, reads: list[Any], writes: list[Any], result: Any, rule: Rule
    ) -> None:
        """Add the events of an operation."""
        rows, now = self._rows, time.monotonic_ns()
        operation = rows.name(name)
        made = arrays_in(result)
        # The caller holds all arrays that are written or made, so none of them can die here.
        read = {self._operand(one): None for one in reads}
        written = {self._operand(one): None for one in writes}
        new: dict[int, None] = {}
        for one in made:
            if rows.known(one) is None:
                new[rows.begin(one, operation, began, now)] = None
        if made and not (new or written or rule.looks) and all(rows.known(one) in read for one in made):
            return  # only views were made
        rows.accesses(read, written | new if rule.fills else written, operation, began, now)

    def note(self, name: str, reads: list[Any], result: Any) -> None:
        """Record a finished operation that has read some arrays and made at most one result."""
        self._note(name, time.monotonic_ns(), reads, [], result, PLAIN)

    def _operand(self, array: Any) -> int:
        buffer = self._rows.known(array)
        if buffer is None:
            self._rows.late += 1
            buffer = self._rows.begin(array)
        return buffer

    def watched(self, operands: Operands, result: Any, writes: list[Any]) -> Any:
        """Return a result with watched arrays for plain ones; given or written arrays stay as they were."""
        library = CLASSES.get(type(result))
        if library is not None:
            given = operands.original(result)
            if given is not result or any(result is one for one in writes):
                return given
            return type(result).view(result, library)
        if isinstance(result, tuple):
            parts = [self.watched(operands, one, writes) for one in result]
            return type(result)(*parts) if hasattr(result, "_fields") else type(result)(parts)
        if type(result) is list and result and is_array(result[0]):
            return [self.watched(operands, one, writes) for one in result]
        return result

    def _know_library_of(self, thing: Any) -> None:
        name = (thing if isinstance(thing, type) else type(thing)).__module__.partition(".")[0]
        if name == "cupy":
            from mempool.recording.arrays import cupy_arrays  # noqa: F401 - which enlists its class
        if name in ("numpy", "cupy"):
            self._frameworks.add(name)

    # --- the trace

    def _table(self) -> dict[str, Any]:
        table = dict(zip(FIELDS, self._rows.table().T, strict=True))
        table["category"] = np.full(len(table["kind"]), -1, np.int64)
        allocs = np.flatnonzero(table["kind"] == EventType.ALLOC)
        for row in allocs[np.isin(table["buffer"][allocs], list(self._categories))].tolist():
            table["category"][row] = self._rows.name(self._categories[int(table["buffer"][row])])
        return table

    def _trace(self, table: dict[str, Any], **metadata: str) -> Trace:
        columns = {name: values for name, values in table.items() if name not in ("began", "address")}
        columns["time_ns"] = np.where(table["began"] >= 0, table["began"], table["time_ns"])
        return Trace.of(**columns, names=self._rows.names, metadata=self._metadata() | metadata)

    def _metadata(self) -> dict[str, str]:
        cupy = self._frameworks == {"cupy"}
        return {
            "framework": "+".join(sorted(self._frameworks)) or "numpy",
            "alignment": "512" if cupy else "64",
            "time": "operation",  # the events of an operation share the time of its beginning
            "accesses": "partial" if self._escaped else "watched",
            "escaped_buffers": str(len(self._escaped)),
            "late_buffers": str(self._rows.late),
        }


def _listed(arrays: Any) -> Any:
    """Return iterables that are no arrays as lists."""
    if is_array(arrays) or isinstance(arrays, (tuple, list, dict)) or not hasattr(arrays, "__iter__"):
        return arrays
    return list(arrays)


def _is_array_of(result: Any, args: Any) -> bool:
    """Return true if a result is one of the later arguments: functions return their ``out``."""
    return type(result) in CLASSES and any(result is one for one in args[1:])


def _without(arrays: list[Any], others: list[Any]) -> list[Any]:
    """Return arrays without some of them, removing one occurrence each."""
    left = arrays
    for other in arrays_in(others) if others else ():
        last = next((at for at in range(len(left) - 1, -1, -1) if left[at] is other), None)
        left = left if last is None else left[:last] + left[last + 1 :]
    return left

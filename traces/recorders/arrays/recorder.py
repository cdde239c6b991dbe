"""Records what is done with the arrays that it watches."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from traces.recorders.arrays import current, of_numpy
from traces.recorders.arrays.conversions import Conversions
from traces.recorders.arrays.modules import Function, Module
from traces.recorders.arrays.operands import CLASSES, Operands, arrays_in, is_array
from traces.recorders.arrays.rows import FIELDS, Rows
from traces.recorders.arrays.rules import PLAIN, Rule
from traces.trace import Kind, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from types import ModuleType, TracebackType

#: Positions of arrays among arguments; None: all of them.
Also = frozenset[int] | None
NONE: frozenset[int] = frozenset()


class ArrayRecorder:
    """Records one trace while its ``with`` block runs, of all threads; one recorder at a time.

    A buffer is the memory of the array that owns it, and lives as long; views are of the same buffer. An
    operation is a read or write of each buffer that it touches; what only makes views touches nothing. Events
    come at the end of their operation: what it makes, what it reads, what it writes. All have one time, that
    of its beginning.
    """

    def __init__(self, *, frames: bool = False) -> None:
        """Nothing is recorded before the block begins.

        Args:
            frames: keep the program's source line of each event, which costs about a microsecond each.
        """
        self._rows = Rows(frames=frames)
        self._categories: dict[int, str] = {}
        self._escaped: set[int] = set()
        self._conversions = Conversions()
        self._frameworks: set[str] = set()

    # --- for people

    def __enter__(self) -> Self:
        current.enter(self)
        self._conversions.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._conversions.end()
        current.leave()
        self._rows.close()

    def leave_to_the_parent(self) -> None:
        """For a forked child, which records nothing."""
        self._conversions.end()
        self._rows.leave_to_the_parent()

    def watch(self, arrays: Any) -> Any:
        """The same arrays, watched: views of a subclass of their own class.

        Args:
            arrays: an array of NumPy or CuPy, or a list, tuple or dict of such; anything else in there stays
                as it is. Masked arrays are watched in their data and mask.

        Raises:
            TypeError: an array of another subclass, which would lose what it can do.
        """
        if isinstance(arrays, (list, tuple)):
            watched = [self.watch(one) for one in arrays]
            return type(arrays)(*watched) if hasattr(arrays, "_fields") else type(arrays)(watched)
        if isinstance(arrays, dict):
            return {key: self.watch(one) for key, one in arrays.items()}
        if isinstance(arrays, np.ma.MaskedArray):
            return of_numpy.watch_masked(arrays, self.watch)
        self._know_library_of(arrays)
        if not is_array(arrays) or type(arrays) in CLASSES.values():
            return arrays
        library = np.ndarray if isinstance(arrays, np.memmap) else type(arrays)
        if library not in CLASSES:
            raise TypeError(f"a {library.__name__} cannot be watched; its plain array can")
        self._rows.buffer(arrays)
        return library.view(arrays, CLASSES[library])

    def own(self, category: str, arrays: Any) -> None:
        """Say what the buffers of some arrays are to the program, such as "parameters".

        Args:
            category: the word for it.
            arrays: an array, or a list, tuple or dict of arrays, watched or not.
        """
        for one in arrays_in(_listed(arrays)):
            self._categories[self._rows.buffer(one)] = category

    def mark(self, name: str) -> None:
        """Say that a phase begins, such as "forward"."""
        self._rows.mark(name)

    def step(self) -> None:
        """Say that one iteration ends and the next begins. With a pool, its own ``step`` does."""
        self._rows.mark("step")

    def touch(self, arrays: Any, *, read: bool = True, write: bool = False, name: str = "touch") -> None:
        """Declare an access that cannot be seen, by C code or through a plain view.

        Args:
            arrays: one array or several, watched or not.
            read: whether it was read.
            write: whether it was written.
            name: of the operation.
        """
        found = arrays_in(_listed(arrays))
        self._note(name, time.monotonic_ns(), found if read else [], found if write else [], None, PLAIN)

    def calls(self, function: Callable[..., Any], writes: Iterable[int] | None = None) -> Callable[..., Any]:
        """A function that looks at plain arrays itself, such as one in C, or a kernel of CuPy: recorded.

        Args:
            function: is called with plain arrays in place of watched ones; arrays in its result are watched.
            writes: which arrays among its arguments it writes, counted from 0; None: it may write all.

        Returns:
            A function that reads all arrays among its arguments.
        """
        return Function(function, also=None if writes is None else frozenset(writes))

    def module(self, module: ModuleType) -> Any:
        """NumPy, CuPy, or a module like them, whose functions are recorded whatever arrays they are given.

        What they make is watched, random numbers too. For programs that take their array module as a value,
        ``xp``, and for CuPy, many of whose functions do not tell of themselves otherwise.
        """
        self._know_library_of(getattr(module, "ndarray", None))
        return Module(module)

    @property
    def escaped(self) -> int:
        """Buffers of watched arrays of which somebody is known to have taken a plain view."""
        return len(self._escaped)

    def trace(self) -> Trace:
        """What was recorded so far."""
        return self._trace(self._table())

    # --- for watched arrays

    def operation(
        self, name: str, call: Callable[..., Any], args: Any, kwargs: Any, rule: Rule, also: Also = NONE
    ) -> Any:
        """Do an operation on plain arrays, note it, and give its result with watched arrays.

        Args:
            name: of the operation.
            call: it.
            args: its arguments.
            kwargs: by name.
            rule: how it differs from most.
            also: which of the arrays among them it writes, counted from 0; None: all.
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
        finally:  # what raises may have written as well
            if _is_array_of(result, args) and not any(result is one for one in arrays_in(unread)):
                written.append(result)  # `out` by its place
                unread.append(result)
            reads = [] if rule.metadata else _without(operands.arrays, unread)
            writes = arrays_in(written)
            self._note(name, began, reads, writes, result, rule)
        return self.watched(operands, result, writes)

    def escape(self, array: Any) -> None:
        """Somebody takes a plain view of a watched array: what is done there is not seen."""
        buffer = self._rows.buffer(array)
        self._escaped.add(buffer)
        now = time.monotonic_ns()
        self._rows.accesses([buffer], [], self._rows.name("escape"), now, now)

    def _note(
        self, name: str, began: int, reads: list[Any], writes: list[Any], result: Any, rule: Rule
    ) -> None:
        """The events of an operation."""
        rows, now = self._rows, time.monotonic_ns()
        operation = rows.name(name)
        made = arrays_in(result)
        # What is written or made is held by the caller, so nothing of it can die here.
        read = {self._operand(one): None for one in reads}
        written = {self._operand(one): None for one in writes}
        new: dict[int, None] = {}
        for one in made:
            if rows.known(one) is None:
                new[rows.begin(one, operation, began, now)] = None
        if made and not (new or written or rule.looks) and all(rows.known(one) in read for one in made):
            return  # views
        rows.accesses(read, written | new if rule.fills else written, operation, began, now)

    def note(self, name: str, reads: list[Any], result: Any) -> None:
        """An operation is over that has read some arrays and made another or none."""
        self._note(name, time.monotonic_ns(), reads, [], result, PLAIN)

    def _operand(self, array: Any) -> int:
        buffer = self._rows.known(array)
        if buffer is None:
            self._rows.late += 1
            buffer = self._rows.begin(array)
        return buffer

    def watched(self, operands: Operands, result: Any, writes: list[Any]) -> Any:
        """A result with watched arrays for plain ones; what was given, and written, comes back as it was."""
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
            from traces.recorders.arrays import of_cupy  # noqa: F401 - which enlists its class
        if name in ("numpy", "cupy"):
            self._frameworks.add(name)

    # --- the trace

    def _table(self) -> dict[str, Any]:
        table = dict(zip(FIELDS, self._rows.table().T, strict=True))
        table["category"] = np.full(len(table["kind"]), -1, np.int64)
        allocs = np.flatnonzero(table["kind"] == Kind.ALLOC)
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
            "time": "operation",  # all events of one have the time of its beginning
            "accesses": "partial" if self._escaped else "watched",
            "escaped_buffers": str(len(self._escaped)),
            "late_buffers": str(self._rows.late),
        }


def _listed(arrays: Any) -> Any:
    """Iterables that are no arrays, as lists."""
    if is_array(arrays) or isinstance(arrays, (tuple, list, dict)) or not hasattr(arrays, "__iter__"):
        return arrays
    return list(arrays)


def _is_array_of(result: Any, args: Any) -> bool:
    """Whether a result is one of the later arguments: functions give their ``out`` back."""
    return type(result) in CLASSES and any(result is one for one in args[1:])


def _without(arrays: list[Any], others: list[Any]) -> list[Any]:
    """Arrays without some of them; what is there twice stays once."""
    left = arrays
    for other in arrays_in(others) if others else ():
        last = next((at for at in range(len(left) - 1, -1, -1) if left[at] is other), None)
        left = left if last is None else left[:last] + left[last + 1 :]
    return left

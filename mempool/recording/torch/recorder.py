"""Dispatch mode that records the memory accesses of each operation."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.recording.torch.context import BACKWARD, FORWARD, OPTIMIZER, Context
from mempool.recording.torch.ledger import Known, Ledger, head_of, is_wrapper, storages_in
from mempool.recording.torch.operations import Operation, learn
from mempool.recording.torch.rows import LIMIT, MARK, MODULE, NAME, PHASE, READ, SPAN, WRITE, Rows
from mempool.recording.torch.tracing import FOUND_STEP, STEP, as_trace
from traces.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mempool.recording.torch.rows import Table
    from traces.trace import Trace

_task = torch._C._current_graph_task_id
_function_modes = torch._C._len_torch_function_stack
_DEVICE = torch.ops.prim.device.default
_PHASES = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}


class AccessRecorder(TorchDispatchMode):
    """Recorder of one trace while the ``with`` block runs.

        with AccessRecorder([model], [optimizer]) as recorder:
            for batch in batches:
                train(batch)
        trace = recorder.trace()

    A storage is a buffer. An operation gives an event for each storage that it reads or writes according to
    the schema; written storages may be read, too. Views access no storage. All events of an operation have
    the operation's start time.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        modules: Iterable[torch.nn.Module] = (),
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        clock: Callable[[Any, Any, Any, Any], int] | None = None,
        limit: int = LIMIT,
        places: bool = False,
    ) -> None:
        """Make a recorder.

        Args:
            modules: modules whose parameters and buffers are registered at the start. Other modules are
                registered when called.
            optimizers: optimizers registered at the start; the steps of the last one end iterations. By
                default, the first optimizer that steps ends iterations.
            limit: most events to keep, 24 bytes each; at the limit, recording ends with a warning and
                ``truncated`` in the trace's metadata.
            places: also record the address of each buffer and the time span of each operation: see `table`.
            clock: function (operation, arguments, keyword arguments, result) that returns the operation's
                nanoseconds; times are sums of these. None: the host's clock.
        """
        super().__init__()
        self._given = list(modules), list(optimizers)
        self._clock, self._modelled_ns = clock, 0
        self._now = time.perf_counter_ns if clock is None else self._modelled
        self._rows, self._places = Rows(limit), places
        self._ledger = Ledger(self._rows, self._now, places=places)
        self._known = self._ledger.known
        self._context = Context(self._ledger, self.detected_step)
        self._operations: dict[Any, tuple[Operation, int]] = {}
        self._names: dict[str, int] = {}
        self._wrappers: dict[type, bool] = {}
        self._entered = False

    def _modelled(self) -> int:
        return self._modelled_ns

    def __enter__(self) -> Self:
        """Start recording.

        Raises:
            TraceError: this recorder has recorded already, or another recorder is active.
        """
        if self._entered or any(mode in _active and not mode._rows.full for mode in _modes()):
            raise TraceError("a recorder records once, and not inside another")
        self._entered = True
        (modules, optimizers), self._given = self._given, ([], [])
        self._ledger.mode = torch._guards.active_fake_mode()
        with contextlib.ExitStack() as stack:
            stack.callback(self._context.leave)
            self._context.enter(modules, optimizers)
            stack.enter_context(self._ledger.watching())
            super().__enter__()
            self._until = stack.pop_all()
        _active.add(self)
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._until.close()
        self._rows.forget()
        _active.discard(self)

    def own(self, category: str, tensors: Iterable[torch.Tensor]) -> None:
        """Declare the role of tensors in the program."""
        self._ledger.own(category, tensors)

    def mark(self, name: str) -> None:
        """Mark the beginning of a phase.

        "forward", "backward" and "optimizer" set the phase of operations until the next mark or step; any
        other name adds a mark of that name and sets the phase "forward".
        """
        self._context.told = _PHASES.get(name, FORWARD)
        if name not in _PHASES:
            self._mark(name)

    def step(self) -> None:
        """Mark the end of an iteration; optimizer steps no longer end iterations."""
        self._context.told = FORWARD
        self._mark(STEP)

    def detected_step(self) -> None:
        """Mark the end of an iteration by an optimizer step; marks of `step`, if any, replace such marks."""
        self._mark(FOUND_STEP)

    def _mark(self, name: str) -> None:
        number = self._names.setdefault(name, len(self._names))
        self._rows.extend((head_of(self._context.here().index, number, -1) | MARK, -1, self._now()))

    def table(self) -> Table:
        """Return the rows recorded so far, as a table."""
        return self._rows.table()

    @property
    def names(self) -> tuple[list[str], list[str]]:
        """Names of operations and paths of modules, by the numbers in a table."""
        return list(self._names), self._context.names

    def trace(self, table: Table | None = None) -> Trace:
        """Return the trace recorded so far, or the trace of the given table."""
        return as_trace(
            self.table() if table is None else table,
            self._ledger,
            list(self._names),
            self._context.names,
            {"truncated": "yes"} if self._rows.truncated else {},
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # frequent, so answered here
        if _function_modes() == 0:
            return self._see(func, types, args, kwargs)
        with torch._C.DisableTorchFunction():  # hide the recorder's own calls from function modes
            return self._see(func, types, args, kwargs)

    def _see(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and self._any_wraps(types):
            return NotImplemented  # the wrapper decomposes the operation into recorded parts
        if self._rows.full:
            return func(*args, **(kwargs or {}))
        began = self._now()
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self._clock is not None:
            self._modelled_ns += self._clock(func, args, kwargs or {}, result)
        operation, name = self._operations.get(func) or self._learn(func)
        if operation.views:
            for plain, storage in storages_in(result):
                known = self._known.get(id(storage))
                if known is None:
                    self._ledger.meet(plain, storage, self._head(name), began, made=False)
                elif known.size != storage.nbytes():
                    self._ledger.resized(known, storage, self._head(name), began)
        elif not operation.asks:
            head = self._head(name)
            self._note(operation, head, args, kwargs, result, began)
            if self._places:
                self._rows.extend((head | SPAN, time.perf_counter_ns(), began))
        return result

    def _any_wraps(self, types: Iterable[type]) -> bool:
        for kind in types:
            wraps = self._wrappers.get(kind)
            if wraps is None:
                wraps = self._wrappers[kind] = is_wrapper(kind)
            if wraps:
                self._ledger.apart = True
                return True
        return False

    def _learn(self, func: Any) -> tuple[Operation, int]:
        operation = learn(func)
        number = self._names.setdefault(operation.name, len(self._names))
        found = self._operations[func] = operation, (number + 1) << NAME
        return found

    def _head(self, name: int) -> int:
        """Return the common head of the rows of this thread's present operation."""
        context = self._context
        here = context.threads.get(get_ident()) or context.here()
        if _task() == -1 and not context.optimizers:
            return name | here.place | context.told << PHASE
        phase, module = context.phase_and_module(here)
        return name | here.head | phase << PHASE | (module + 1) << MODULE

    def _note(self, operation: Operation, head: int, args: Any, kwargs: Any, result: Any, began: int) -> None:
        if operation.whole:
            args, kwargs = ((args, kwargs),), None
        read, written = self._given_to(operation, args, kwargs, head, began)
        if operation.makes:
            returned, made = self._returned(result, head, began)
            if returned and not made and not written:
                return  # a view that the schema does not declare
            if operation.fills:
                written.update(made)
        if operation.scratch:
            self._ledger.scratch(result, head, began)
        rows: list[int] = []
        reads, writes = head | READ, head | WRITE
        for key, known in read.items():
            if key not in written:
                rows += (reads, known.buffer, began)
        for known in written.values():
            rows += (writes, known.buffer, began)
        self._rows.extend(rows)
        if len(self._rows) >= self._rows.limit:
            self._rows.end()

    def _given_to(
        self, operation: Operation, args: Any, kwargs: Any, head: int, began: int
    ) -> tuple[dict[int, Known], dict[int, Known]]:
        """Return the storages that an operation reads, and those that it writes."""
        read: dict[int, Known] = {}
        written: dict[int, Known] = {}
        given = len(args)
        for position, name, writes in operation.arguments:
            if position < given:
                value = args[position]
            elif kwargs and name in kwargs:
                value = kwargs[name]
            else:
                continue
            for plain, storage in storages_in(value):
                key = id(storage)
                known = self._known.get(key) or self._ledger.meet(plain, storage, head, began, made=False)
                if known is None:
                    continue
                if not writes:
                    read[key] = known
                else:
                    written[key] = known
                    if known.size != storage.nbytes():
                        self._ledger.resized(known, storage, head, began)
        return read, written

    def _returned(self, result: Any, head: int, began: int) -> tuple[bool, dict[int, Known]]:
        """Return whether the result has any tensor, and the new storages."""
        made: dict[int, Known] = {}
        returned = False
        for plain, storage in storages_in(result):
            returned = True
            if id(storage) not in self._known:
                new = self._ledger.meet(plain, storage, head, began, made=True)
                if new is not None:
                    made[new.key] = new
        return returned, made


#: The active recorders; none in a forked child, which has only a part of the program.
_active: weakref.WeakSet[AccessRecorder] = weakref.WeakSet()


def _stop_in_child() -> None:
    for recorder in list(_active):
        recorder._rows.forget()


os.register_at_fork(after_in_child=_stop_in_child)


def _modes() -> list[Any]:
    return list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())

"""A dispatch mode that moves storages to the host and back, so that what is here stays within a budget."""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.torch.swapping.governor import Governor
from mempool.torch.swapping.mover import Mover
from mempool.torch.swapping.needs import Needs
from mempool.torch.swapping.program import FETCH, Program, program_of
from mempool.torch.swapping.report import SwapCounts
from mempool.torch.swapping.storages import AWAY, COMING, HERE, LEAVING, Held, Storages
from mempool.torch.swapping.tape import Tape, recorded
from solvers.errors import PlanError
from solvers.swap import SwapPlanner
from traces.recorders.torch.operations import Operation, learn
from traces.recorders.torch.storages import is_wrapper, storages_in

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool.torch.swapping.engine import Engine

log = logging.getLogger("mempool")


class Swapper(TorchDispatchMode):
    """Keeps what the storages of one device take within a budget.

    Before an operation, all that it is given is brought here, whatever any plan says: so no result ever depends
    on a plan. In an iteration like the one that was recorded, a schedule moves storages in time; in others,
    what was unused for longest leaves when room is needed.
    """

    supports_higher_order_operators = True

    def __init__(
        self, engine: Engine, device: torch.device, limit_bytes: int, *, alignment: int = 64
    ) -> None:
        """Make one; it works inside its ``with``."""
        super().__init__()
        self.engine = engine
        self.limit_bytes = limit_bytes
        self.counts = SwapCounts()
        self.storages = Storages(device, alignment)
        self.program: Program | None = None
        self._mover = Mover(engine, device, self.storages, self.counts)
        self._governor = Governor(self.storages, self._mover, self.counts, limit_bytes)
        self._known = self.storages.known
        self._operations: dict[Any, Operation] = {}
        self._wrappers: dict[Any, bool] = {}
        self._needs = Needs()
        self._tape = Tape()
        self._before: Tape | None = None
        self._on_plan = False
        self._rows: dict[int, Held] = {}
        self._clock = 0
        self._optimizer: Any = None
        self._hook: Any = None

    # --- the iteration

    def __enter__(self) -> Swapper:
        self._hook = register_optimizer_step_post_hook(self._stepped)
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._hook.remove()
        self.bring_all()

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.step()

    def step(self) -> None:
        """An iteration has ended."""
        self._bury()
        tape = self._tape
        tape.marks.append(self.engine.mark())
        if len(tape):
            if not self._on_plan or len(tape) != len(self.program.functions):
                self.counts.diverged += self.program is not None
                if self.program is None or (self._before is not None and tape.agrees(self._before)):
                    self._plan(tape)
            self._before = tape
        self._begin()

    def _begin(self) -> None:
        """The next iteration."""
        self._tape = Tape(there=[held for held in self._known.values()])
        self._on_plan = self.program is not None
        self._rows.clear()
        for held in self._tape.there:
            held.born = None
            held.row = -1
        if self.program is not None:
            self._bind()

    def _bind(self) -> None:
        """Which storages the program's rows of what is always there are now."""
        alive = {held.number: held for held in self._tape.there}
        step = self.program.recorded.step
        for row, number in enumerate(self.program.recorded.numbers):
            if step.persistent[row] and number in alive:
                self._rows[row] = held = alive[number]
                held.row = row

    def _plan(self, tape: Tape) -> None:
        made = recorded(tape, self.engine.seconds(tape.marks))
        planner = SwapPlanner(made.step, self.engine.link())
        try:
            swap = planner.hold(self.limit_bytes)
        except PlanError as error:
            log.warning("swapping cannot be planned: %s", error)
            self.program = None
            return
        self.program = program_of(tape, made, swap)
        self.counts.plans += 1

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for kind in types:
            if kind is FakeTensor:
                return func(*args, **kwargs)
            wraps = self._wrappers.get(kind)
            if wraps is None:
                wraps = self._wrappers[kind] = is_wrapper(kind)
            if wraps:
                return NotImplemented
        operation = self._operations.get(func)
        if operation is None:
            operation = self._operations[func] = learn(func)
        if operation.asks:
            return func(*args, **kwargs)
        if operation.views:
            self._view(args)
            return func(*args, **kwargs)
        return self._run(func, operation, args, kwargs)

    def _view(self, args: Any) -> None:
        """PyTorch checks that a view lies within its storage: so that is brought, as if for the operation before."""
        at = max(len(self._tape) - 1, 0)
        for _, storage in storages_in(args[0]) if args else ():
            if (held := self._known.get(id(storage))) is not None:
                if held.state in (AWAY, COMING):
                    self._mover.bring(held)
                self._tape.touched.append((held.number, at, False))

    def _run(self, func: Any, operation: Operation, args: Any, kwargs: Any) -> Any:
        self._bury()
        tape = self._tape
        at = len(tape)
        given, written = self._given(operation, args, kwargs)
        program = self.program if self._on_plan else None
        if program is not None:
            if at < len(program.functions) and program.functions[at] is func:
                if at in program.before:
                    self._act_before(program.before[at], given)
            else:
                self._on_plan, program = False, None
        need = self._needs.of(func, args, kwargs)
        absent = [held for held in given if held.state != HERE]
        self._governor.make_room(need + sum(held.room for held in absent if held.state == AWAY), given)
        for held in absent:
            self._mover.bring(held)
        tape.functions.append(func)
        tape.marks.append(self.engine.mark())
        result = func(*args, **kwargs)
        self._clock += 1
        for held in given:
            held.last = self._clock
            tape.touched.append((held.number, at, held in written))
        for held in written:
            self._mover.wrote(held)
        made = 0
        place = 0
        for plain, storage in storages_in(result):
            if id(storage) in self._known:
                continue
            held = self.storages.meet(plain, storage, (at, place), self._clock)
            if held is not None:
                place += 1
                made += held.room
                tape.born.append((held.number, at, held.room))
                tape.touched.append((held.number, at, True))
                if program is not None and (row := program.recorded.born.get(held.born)) is not None:
                    held.row = row
                    self._rows[row] = held
        tape.rooms.append(0)
        self._needs.learn(func, args, made)
        self.counts.peak_bytes = max(self.counts.peak_bytes, self.storages.here_bytes)
        if program is not None and at in program.after:
            for row in program.after[at]:
                if (held := self._rows.get(row)) is not None:
                    self._mover.leave(held)
        return result

    def _given(self, operation: Operation, args: Any, kwargs: Any) -> tuple[list[Held], list[Held]]:
        """Storages among the arguments, and those of them that are written."""
        given: dict[int, Held] = {}
        written: dict[int, Held] = {}
        if operation.whole:
            pairs: Iterable[tuple[Any, bool]] = [((args, kwargs), True)]
        else:
            pairs = [
                (args[a.position] if a.position < len(args) else kwargs.get(a.name), a.written)
                for a in operation.arguments
            ]
        for value, writes in pairs:
            if value is None:
                continue
            for plain, storage in storages_in(value):
                held = self._known.get(id(storage)) or self.storages.meet(plain, storage, None, self._clock)
                if held is None:
                    continue
                if held not in self._tape.there and held.born is None:
                    self._tape.there.append(held)
                given[held.key] = held
                if writes:
                    written[held.key] = held
                if held.state in (HERE, LEAVING) and storage.nbytes() != held.size:
                    self.storages.resized(held, storage.nbytes())
        return list(given.values()), list(written.values())

    def _bury(self) -> None:
        for held in self.storages.buried():
            if held.copy is not None:
                self.engine.drop(held.copy)
            self._tape.ended[held.number] = len(self._tape)
            if self._rows.get(held.row) is held:
                del self._rows[held.row]

    def _act_before(self, actions: list[tuple[int, int]], given: list[Held]) -> None:
        for action, row in actions:
            held = self._rows.get(row)
            if held is None:
                continue
            if action == FETCH:
                self._mover.fetch(held)
            elif held not in given:
                self._mover.release(held)

    def bring_all(self) -> None:
        """Have everything here."""
        self._mover.bring_all()

"""Iterations of a program: what each one did, the plan made from one, and where in that it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.torch.swapping.patterns import Pattern, Patterns
from mempool.torch.swapping.planning import Planning
from mempool.torch.swapping.program import FETCH, Program
from mempool.torch.swapping.reserved import Settling
from mempool.torch.swapping.tape import Tape

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from mempool import _core
    from mempool.torch.swapping.engine import Engine
    from mempool.torch.swapping.mover import Mover
    from mempool.torch.swapping.report import SwapCounts
    from mempool.torch.swapping.storages import Held, Storages


#: Where nobody says where iterations end, what was is forgotten after so many operations.
_LONGEST = 1 << 19


class Iterations:
    """Follows a program of moves while the iteration is the one that it was made from.

    Which of several it is, is foretold by their order; where an operation shows that it is another, that is
    followed from there on.

    Attributes:
        limit_bytes: what plans hold, bytes.
        tape: the iteration so far.
        following: whether this iteration has been like the plan's so far.
    """

    def __init__(
        self,
        engine: Engine,
        storages: Storages,
        mover: Mover,
        counts: SwapCounts,
        limit_bytes: int,
        host_bytes: int | None = None,
        client: _core.Client | None = None,
    ) -> None:
        self._engine = engine
        self._storages = storages
        self._mover = mover
        self._counts = counts
        self._planning = Planning(engine, host_bytes, storages.alignment)
        self._settling = Settling(client)
        self.limit_bytes = limit_bytes
        self.following = False
        self.tape = Tape()
        self._patterns = Patterns()
        self._pattern: Pattern | None = None
        self._first: Pattern | None = None  # of the first iteration, which makes what later ones have
        self._sizes_differ = False
        self._rows: dict[int, Held] = {}
        self._arrived: list[tuple[int, Any]] = []  # rows of the schedule, and their copies

    @property
    def plan(self) -> Program | None:
        """The program of moves that is followed, or was last; None: there is none yet."""
        return None if self._pattern is None else self._pattern.program

    @property
    def held_bytes(self) -> int:
        """The limit, or the least that the plan can hold: to hold less beside the peak has no use."""
        return self.limit_bytes if self.plan is None else max(self.limit_bytes, self.plan.swap.limit_bytes)

    # --- operations

    def before(self, func: Any, given: Container[int]) -> None:
        """Move what the plan moves before the next operation, which is given storages with these keys."""
        if not self.following or self.plan is None:
            return
        at, functions = len(self.tape.functions), self.plan.tape.functions
        if (at >= len(functions) or functions[at] is not func) and not self._switch(func):
            self._depart()
            return
        for action, row in self.plan.before.get(at, ()):
            if (held := self._rows.get(row)) is None:
                continue
            if action != FETCH:
                if held.key not in given:
                    self._mover.release(held)
            elif self._storages.here_bytes + held.room <= self.held_bytes:  # else when it is asked for
                self._mover.fetch(held)

    def mark(self) -> Any:
        """The moment at which an operation begins; None where the plan knows how long all take."""
        if self.following and not self._sizes_differ:
            self._engine.look()
            return None
        return self._engine.mark()

    def ran(
        self,
        func: Any,
        mark: Any,
        given: Iterable[Held],
        written: Container[int],
        made: Iterable[Held],
        room: int = 0,
    ) -> None:
        """Write an operation down that began at the mark, and let leave what the plan lets leave after it.

        What it took for itself while it ran is ``room``, in bytes.
        """
        tape, at = self.tape, len(self.tape.functions)
        tape.functions.append(func)
        tape.marks.append(mark)
        tape.rooms.append(room)
        touched = tape.touched
        tape.first.append(len(touched))
        for held in given:
            touched.append(held.number << 1 | (held.key in written))
        for held in made:
            tape.born.append((held.number, at, held.room))
            touched.append(held.number << 1 | 1)
        if self.following:
            self._after(at, made)
        if at + 1 >= _LONGEST:
            self.begin()

    def _after(self, at: int, made: Iterable[Held]) -> None:
        for held in made:
            self._bind_one(held)
        if (plan := self.plan) is None:
            return
        if self._mover.arrived:
            for row, transfer in self._mover.arrived:
                if (move := plan.returns.get((at, row))) is not None:
                    self._arrived.append((move, transfer))
            self._mover.arrived.clear()
        for row in plan.after.get(at, ()):
            if (leaves := self._rows.get(row)) is not None:
                self._mover.leave(leaves)

    def until(self, held: Held) -> int | None:
        """Operations until a storage is used next; None where no plan tells."""
        if not self.following or self.plan is None or held.row < 0:
            return None
        return self.plan.uses.until(held.row, len(self.tape))

    def viewed(self, held: Held) -> None:
        """A view was made: as if the operation before had touched its storage."""
        self.tape.touched.append(held.number << 1)

    def met(self, held: Held) -> None:
        """A storage was met that no operation made, such as a batch from another thread."""
        at = len(self.tape)
        held.born = at, -1 - self.tape.met.get(at, 0)
        self.tape.met[at] = -held.born[1]
        self.tape.born.append((held.number, at, held.room))
        if self.following:
            self._bind_one(held)

    def _bind_one(self, held: Held) -> None:
        if (plan := self.plan) is None or held.born is None:
            return
        if (row := plan.recorded.born.get(held.born)) is not None:
            self._rows[row] = held
            held.row = row
            if held.room != plan.rooms[row] and not self._sizes_differ:
                self._sizes_differ = not self._switch()

    def gone(self, held: Held) -> None:
        """A storage has ended."""
        self.tape.ended[held.number] = len(self.tape)
        if self._rows.get(held.row) is held:
            del self._rows[held.row]

    def _switch(self, func: Any = None) -> bool:
        """Follow another plan, if there is one whose iteration was like this one until now."""
        if (other := self._patterns.like(self.tape, func, self._pattern)) is None:
            return False
        self._pattern, self._sizes_differ = other, False
        self._bind(other.program)
        self._catch_up(other.program)
        return True

    def _depart(self) -> None:
        """This is not the planned iteration: nobody would wait for what is on its way."""
        self.following = False
        self._mover.settle_all()

    # --- from one to the next

    def end(self) -> None:
        """An iteration has ended, the next one begins."""
        tape, goes_on = self.tape, self._as_planned()
        if len(tape):
            self._counts.ended()
            if not goes_on:
                tape.marks.append(self._engine.mark())
                self._odd(tape)
            elif self._pattern is not None:
                self._improve(self._pattern)
            self._engine.rest()
            before, self._pattern = self._pattern, self._patterns.next()
            goes_on = goes_on and before is self._pattern
        self._start(goes_on=goes_on or not len(tape))

    def begin(self) -> None:
        """An iteration begins; the tape, if it is not empty, is of none."""
        if len(self.tape):
            self._mover.settle_all()
            self._start(goes_on=False)

    def close(self) -> None:
        """No more iterations."""
        self._settling.end()

    def forget(self) -> None:
        """What was taken for iterations until now was none, but the tape is of one."""
        if self.plan is not None:
            self._depart()
        self._pattern = self._first = None
        self._patterns.clear()

    def _as_planned(self) -> bool:
        plan = self.plan
        return plan is not None and self.following and len(self.tape) == len(plan) and not self._sizes_differ

    def _improve(self, pattern: Pattern) -> None:
        """The iteration went by plan: what did it wait for?"""
        plan = pattern.program
        pattern.followed = True
        self._patterns.was(pattern)
        self._planning.warn(plan, self.limit_bytes)
        if better := self._planning.changed(plan, self._arrived, plan.swap.limit_bytes):
            pattern.program = better
            self._settling.changed()
            self._counts.changes += 1
        else:
            self._settling.went_by_plan()

    def _odd(self, tape: Tape) -> None:
        """One that is not as planned: two alike are worth a plan, and the first two get one anyway."""
        if self.plan is not None:
            self._counts.diverged += 1
            self._mover.settle_all()
        made = None
        if not len(self._patterns) or self._first is not None or self._patterns.recurs(tape):
            made = self._patterns.add(self._made(tape))
            if self._first is not None and not self._first.followed:
                self._patterns.drop(self._first)
            self._first = made if self.plan is None else None
            self._pattern = made
        self._patterns.was(made)

    def _made(self, tape: Tape) -> Program:
        made = self._planning.made(tape, self.limit_bytes, tape.seconds(self._engine, self.plan))
        tape.marks.clear()  # on CUDA each is an event
        self._settling.changed()
        self._counts.plans += 1
        self._counts.margin_bytes = max(self.limit_bytes - made.swap.limit_bytes, 0)
        return made

    def _start(self, *, goes_on: bool) -> None:
        self.tape = Tape(there=list(self._storages.known.values()))
        self._sizes_differ = False
        for held in self.tape.there:
            held.born = None
        self.following = self.plan is not None
        self._bind(self.plan)
        if self.plan is not None and not goes_on:
            self._catch_up(self.plan)

    def _bind(self, plan: Program | None) -> None:
        """Which storages the plan's rows are now: of what is always there, and what was made so far."""
        self._rows.clear()
        self._arrived.clear()
        self._mover.arrived.clear()
        alive: dict[int, Held] = {}
        for held in list(self._storages.known.values()):
            held.row = -1
            alive[held.number] = held
        if plan is None:
            return
        rows = [(row, alive.get(number)) for row, number in plan.always]
        rows += [
            (plan.recorded.born[held.born], held)
            for held in alive.values()
            if held.born is not None and held.born in plan.recorded.born
        ]
        for row, bound in rows:
            if bound is not None:
                self._rows[row] = bound
                bound.row = row

    def _catch_up(self, plan: Program) -> None:
        """Of a plan that is followed from now on: what it has away leaves, what it has here comes."""
        at = len(self.tape)
        away = set(plan.away(at))
        for row, held in sorted(self._rows.items(), key=lambda bound: plan.uses.until(bound[0], at)):
            if row in away:
                self._mover.leave(held)
            elif plan.rooms[row] and self._storages.here_bytes + held.room <= self.held_bytes:
                self._mover.fetch(held)

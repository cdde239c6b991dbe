"""Tracking of a program's iterations: recording, planning, and the position within the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.torch.eager.patterns import Pattern, Patterns
from mempool.torch.eager.recorded_iteration import Tape
from mempool.torch.eager.reserved_memory import Settling
from mempool.torch.eager.schedule_actions import FETCH, Line, Program
from mempool.torch.eager.schedule_planner import Planning
from mempool.torch.eager.storages import AWAY

if TYPE_CHECKING:
    from mempool import _core
    from mempool.torch.eager.op_footprints import Need
    from mempool.torch.eager.pool_headroom import Room
    from mempool.torch.eager.report import SwapCounts
    from mempool.torch.eager.storages import Held, Storages
    from mempool.torch.eager.transfers import Mover
    from mempool.torch.offload.engine import Engine


#: Operations after which the tape is dropped if nothing marks the ends of iterations.
_LONGEST = 1 << 19
#: Maximum number of operations per iteration whose footprints are remembered.
_PLACES = 1 << 16
#: Maximum number of replans for a lower limit, and the divisor of the limit that gives the smallest step: the
#: pool holds more than the live bytes.
_MOST_LESS, _LESS = 4, 128
#: Maximum number of changes of the moves after waits, until the pool learns the moves.
_MOST_CHANGES = 4


class Iterations:
    """Follows an offload schedule while the iteration matches the recorded one.

    The next pattern is predicted from the order of the past ones; where an operation shows that the iteration
    is of another pattern, that pattern is followed from there on.

    Attributes:
        limit_bytes: limit for plans, bytes.
        tape: the current iteration so far.
        following: whether the current iteration has matched the plan so far.
        needs: see `Pattern`; shared by all iterations that follow no plan.
        lines: the plan's entry for each operation.
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
        room: Room | None = None,
    ) -> None:
        self._engine = engine
        self._storages = storages
        self._mover = mover
        self._counts = counts
        self._planning = Planning(engine, host_bytes, storages.alignment)
        self._settling = Settling(client)
        self._room = room
        self._evicted = 0  # evictions and delays when this iteration began
        self.limit_bytes = self._asked_bytes = limit_bytes
        self.following = False
        self.needs: list[tuple[Any, Any, Need]] = []
        self._needs = self.needs
        self.lines: list[Line] = []
        self._rooms: list[int] = []
        self.tape = Tape()
        self._patterns = Patterns()
        self._pattern: Pattern | None = None
        self._first: Pattern | None = None  # of the first iteration, which makes the state of later ones
        self._sizes_differ = False
        self._rows: dict[int, Held] = {}
        self._arrived: list[tuple[int, Any]] = []  # (row of the schedule, reload)

    @property
    def plan(self) -> Program | None:
        """Return the offload schedule followed now or last; None if there is none yet."""
        return None if self._pattern is None else self._pattern.program

    @property
    def held_bytes(self) -> int:
        """Return the limit, or the plan's least limit if larger: to hold less off the peak is useless."""
        return self.limit_bytes if self.plan is None else max(self.limit_bytes, self.plan.swap.limit_bytes)

    @property
    def by_plan(self) -> bool:
        """Return whether the plan is followed and holds the planned limit, so nothing else must leave."""
        return self.following and self._pattern is not None and self._pattern.holds

    @property
    def served_by_plan(self) -> bool:
        """Return whether the plan is followed and the pool may follow a plan too: the moves are final."""
        return self.by_plan and self._settling.learns

    @property
    def kept_bytes(self) -> int:
        """Return the most bytes that may be resident at once, whatever the pool reports.

        The value is the same in all iterations if the plan does not hold the limit planned for: then the same
        evictions recur.
        """
        if self._room is None or self._pattern is None:
            return self.limit_bytes
        return self._pattern.limit_bytes if not self._pattern.holds else self._room.limit_bytes

    # --- operations

    def line(self, func: Any, given: list[Held]) -> Line | None:
        """Make the plan's moves before the next operation, whose argument storages are `given`.

        Returns:
            The plan's entry for the operation; None if no plan is followed.
        """
        at = len(self.tape.functions)
        known = at < len(self.lines) and self.lines[at].function is func
        if not known and not self._switch(func):
            self._depart()
            return None
        line = self.lines[at]
        for action, row in line.before:
            if (held := self._rows.get(row)) is None:
                continue
            if action != FETCH:
                if not any(held is one for one in given):
                    self._mover.release(held)
            elif self._has_room(held):  # without room, reloaded on demand
                self._mover.fetch(held)
        return line

    def _has_room(self, held: Held) -> bool:
        if self._storages.here_bytes + held.room > self.held_bytes:
            return False
        if (room := self._room) is None or not room.asks or held.state != AWAY:
            return True
        has = held.room <= room.left()
        self._counts.put_off += not has
        return has

    def needed(self, func: Any, asked: Any, need: Need) -> None:
        """Remember the footprint of the next operation: see `Pattern.needs`."""
        at = len(self.tape.functions)
        if at < len(self.needs):
            self.needs[at] = func, asked, need
        elif at == len(self.needs) < _PLACES:
            self.needs.append((func, asked, need))

    def begins(self) -> None:
        """Mark the beginning of an operation, unless the plan knows all durations."""
        if not self.following or self._sizes_differ:
            self.tape.marks[len(self.tape.functions)] = self._engine.mark()
        elif self._engine.streams:
            self._engine.note_stream()

    def ran(self, func: Any, given: list[Held], written: list[Held], made: list[Held]) -> None:
        """Record an operation that has run, and start the offloads planned after it."""
        tape = self.tape
        at, touched = len(tape.functions), tape.touched
        tape.functions.append(func)
        tape.first.append(len(touched))
        for held in given:
            touched.append(held.number << 1)
        for held in written:
            touched.append(held.number << 1 | 1)
        for held in made:
            tape.born.append((held.number, at, held.room))
            touched.append(held.number << 1 | 1)
        if self.following:
            self._after(at, made)
        if at + 1 >= _LONGEST:
            self.begin()

    def _after(self, at: int, made: list[Held]) -> None:
        line, rows = self.lines[at], self._rows
        for held, row in zip(made, line.made, strict=False):
            rows[row] = held
            held.row = row
            if held.room != self._rooms[row] and not self._sizes_differ:
                self._sizes_differ = not self._switch()
                line = self.lines[at]
        if self._mover.arrived:
            self._note_arrived(at)
        for row in line.gone:
            if (back := rows.get(row)) is not None:
                self._mover.forget(back)
        for row, place in line.after:
            if (leaves := rows.get(row)) is not None:
                self._mover.leave(leaves, place)

    def _note_arrived(self, at: int) -> None:
        if (plan := self.plan) is not None:
            for row, transfer in self._mover.arrived:
                if (move := plan.returns.get((at, row))) is not None:
                    self._arrived.append((move, transfer))
        self._mover.arrived.clear()

    def until(self, held: Held) -> int | None:
        """Return the number of operations until the next use of a storage; None if no plan tells."""
        if not self.following or self.plan is None or held.row < 0:
            return None
        return self.plan.uses.until(held.row, len(self.tape))

    def viewed(self, held: Held) -> None:
        """Record a view of a storage as an access by the previous operation."""
        self.tape.touched.append(held.number << 1)

    def met(self, held: Held) -> None:
        """Record a storage that no operation made, such as a batch from another thread."""
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
        """Record the end of a storage."""
        self.tape.ended[held.number] = len(self.tape)
        if self._rows.get(held.row) is held:
            del self._rows[held.row]

    def _switch(self, func: Any = None) -> bool:
        """Switch to another plan that matches the iteration so far; return whether there is such a plan."""
        if (other := self._patterns.like(self.tape, func, self._pattern)) is None:
            return False
        self._pattern, self._sizes_differ = other, False
        self._bind(other.program)
        self._catch_up(other.program)
        return True

    def _depart(self) -> None:
        """Leave the plan; transfers under way are waited for now, since nobody would wait for them later."""
        self.following = False
        if self._room is not None:
            self._room.asks = True
        self._mover.settle_all()

    # --- between iterations

    def end(self) -> None:
        """End the current iteration and begin the next."""
        tape, goes_on = self.tape, self._as_planned()
        if len(tape):
            self._counts.ended()
            if not goes_on:
                tape.marks[len(tape)] = self._engine.mark()
                self._odd(tape)
            elif self._pattern is not None:
                self._improve(self._pattern)
            self._engine.end_iteration()
            before, self._pattern = self._pattern, self._patterns.next()
            goes_on = goes_on and before is self._pattern
        self._start(goes_on=goes_on or not len(tape))

    def begin(self) -> None:
        """Begin an iteration; operations on the tape, if any, belong to no iteration."""
        if len(self.tape):
            self.resume()

    def unseen(self) -> None:
        """Stop recording and following plans until `resume`; another call drops the tape again."""
        self._depart()
        if self._engine.streams:
            self._engine.note_stream()
        self.tape = Tape()

    def settled(self) -> None:
        """Let the pool learn: the moves will not change, since there are none for a while."""
        self._settling.end()

    def resume(self) -> None:
        """Begin an iteration that is seen from the beginning on."""
        self._mover.settle_all()
        self._start(goes_on=False)

    def close(self) -> None:
        """Let the pool learn: no more iterations follow."""
        self._settling.end()

    def forget(self) -> None:
        """Drop all patterns, since the detected iterations were not real ones; keep the current tape."""
        if self.plan is not None:
            self._depart()
        self._pattern = self._first = None
        self._patterns.clear()

    def _as_planned(self) -> bool:
        plan = self.plan
        return plan is not None and self.following and len(self.tape) == len(plan) and not self._sizes_differ

    def _improve(self, pattern: Pattern) -> None:
        """Adapt the moves of an iteration that went by plan to the waits that occurred."""
        plan = pattern.program
        pattern.followed, before = True, pattern.arrived
        self._patterns.was(pattern)
        self._planning.warn(plan, pattern.limit_bytes, self._asked_bytes)
        arrived, pattern.arrived = self._arrived, [*self._arrived]
        if self._engine.streams:  # the device runs behind: waits are known one iteration later
            arrived = before
            for _, transfer in arrived:
                self._counts.waited(self._engine.waited(transfer))
        if self._room is not None and self._room.arena:
            return  # the pool's plan is made for these moves
        if self._disturbed() and self._for_less(pattern, 0):
            return
        if self._may_change(plan) and (better := self._planning.changed(plan, arrived, self._held(pattern))):
            self._replace(pattern, better)
            self._counts.changes += 1
        else:
            self._settling.went_by_plan()

    def _may_change(self, plan: Program) -> bool:
        """Return whether moves may adapt to waits: waits vary, and the pool needs moves that do not."""
        return self._room is None or (plan.changes < _MOST_CHANGES and not self._settling.learns)

    def _held(self, pattern: Pattern) -> int:
        return self.limit_bytes if self._room is None else pattern.limit_bytes

    def _replace(self, pattern: Pattern, program: Program) -> None:
        pattern.program, pattern.arrived = program, []
        self._settling.changed()

    def _disturbed(self) -> bool:
        """Return whether the pool, holding more than live bytes, caused evictions or delayed reloads."""
        return self._room is not None and self._counts.evicted + self._counts.put_off > self._evicted

    def _for_less(self, pattern: Pattern, less: int) -> bool:
        """Replan for at least `less` bytes less; return False if no try is left or no plan is better."""
        if pattern.lessened >= _MOST_LESS or not pattern.holds:
            return False
        pattern.lessened += 1
        limit = min(self.limit_bytes, pattern.limit_bytes - max(less, self.limit_bytes // _LESS))
        made, before = self._planning.again(pattern.program, limit), pattern.program
        if made is None or (made.swap.limit_bytes, self._planning.arena(made)) >= (
            before.swap.limit_bytes,
            self._planning.arena(before),
        ):
            return False
        pattern.limit_bytes = max(limit, made.swap.limit_bytes)  # so that no eviction adds to planned moves
        self._counts.plans += 1
        self._replace(pattern, made)
        return True

    def undisturbed(self) -> None:
        """Exclude this iteration's evictions so far from `_disturbed`: they had another reason."""
        self._evicted = self._counts.evicted + self._counts.put_off

    def less(self, less: int) -> bool:
        """Replan, at the beginning of an iteration, for `less` bytes less; return whether that succeeded."""
        if self._pattern is None or not self._for_less(self._pattern, less):
            return False
        self._start(goes_on=False)
        return True

    def _odd(self, tape: Tape) -> None:
        """Handle an unplanned iteration: a recurring one gets a plan, and the first two get one anyway."""
        if self.plan is not None:
            self._counts.diverged += 1
            self._mover.settle_all()
        made = None
        worth = not len(self._patterns) or self._first is not None or self._patterns.recurs(tape)
        if worth and (program := self._made(tape)) is not None:
            made = self._patterns.add(program)
            made.limit_bytes = self.limit_bytes
            if self._first is not None and not self._first.followed:
                self._patterns.drop(self._first)
            self._first = made if self.plan is None else None
            self._pattern = made
        self._patterns.was(made)

    def _made(self, tape: Tape) -> Program | None:
        made = self._planning.made(tape, self.plan, self.limit_bytes)
        tape.marks.clear()  # on CUDA each mark is an event
        if made is None:
            return None
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
        self.undisturbed()
        if self._room is not None:
            self._room.begin(by_plan=self.served_by_plan)
        self._bind(self.plan)
        if self.plan is not None and not goes_on:
            self._catch_up(self.plan)

    def _bind(self, plan: Program | None) -> None:
        """Bind the plan's rows to storages: to the persistent ones and to those made so far."""
        self.needs = self._needs if self._pattern is None else self._pattern.needs
        self.lines, self._rooms = ([], []) if plan is None else (plan.lines, plan.rooms)
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
        """Begin a plan at this operation: offload storages that the plan has away, and reload the others."""
        at = len(self.tape)
        away = set(plan.away(at))
        for held in list(self._storages.known.values()):
            if held.row not in away:
                self._mover.forget(held)  # the plan gives the copy's place on the host to others
        for row, held in sorted(self._rows.items(), key=lambda bound: plan.uses.until(bound[0], at)):
            if row in away:
                self._mover.leave(held)
            elif plan.rooms[row] and self._has_room(held):
                self._mover.fetch(held)

"""The guard of the arena against a plain list of intervals."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mempool import _core

LIMIT = 1 << 13
#: Most starts are multiples of 64, as in a plan; a few are not.
starts = st.one_of(st.integers(0, LIMIT // 64 - 1).map(lambda n: n * 64), st.integers(0, LIMIT - 1))
lengths = st.one_of(st.integers(1, 300), st.integers(1, LIMIT))


def naive_hole(live: dict[int, int], size: int, alignment: int, limit: int) -> int:
    """Return the first of the smallest free ranges, cut to the alignment, that hold the size."""
    holes = []
    edge = 0
    for begin, end in [*sorted(live.items()), (limit, limit)]:
        aligned = -(-edge // alignment) * alignment
        room = min(begin, limit) - aligned
        if begin > edge and room >= size:
            holes.append((room, aligned))
        edge = end
        if begin >= limit:
            break
    return min(holes)[1] if holes else limit


class Guard(RuleBasedStateMachine):
    """The occupancy guard equals a list of intervals for any order of takes and releases."""

    def __init__(self) -> None:
        super().__init__()
        self.guard = _core.Occupancy()
        self.live: dict[int, int] = {}
        self.cells: list[int] = []

    def free(self, begin: int, end: int) -> bool:
        return all(end <= b or e <= begin for b, e in self.live.items())

    def take(self, begin: int, end: int) -> None:
        expected = self.free(begin, end)
        assert self.guard.is_free(begin, end) == expected
        if expected:
            self.guard.take(begin, end)
            self.live[begin] = end

    @rule(cells=st.sets(starts, max_size=200), keep=st.booleans())
    def set_planned_slots(self, cells: set[int], keep: bool) -> None:
        self.cells = sorted(cells | set(self.cells if keep else []))
        self.guard.set_planned_slots(self.cells)

    @rule()
    def dense_cells(self) -> None:
        self.cells = list(range(0, LIMIT, 1 << 1))
        self.guard.set_planned_slots(self.cells)

    @rule(begin=starts, length=lengths)
    def take_anywhere(self, begin: int, length: int) -> None:
        self.take(begin, min(begin + length, LIMIT))

    @precondition(lambda self: self.cells)
    @rule(data=st.data(), length=lengths)
    def take_a_cell(self, data: st.DataObject, length: int) -> None:
        begin = data.draw(st.sampled_from(self.cells))
        self.take(begin, min(begin + length, LIMIT))

    @rule(size=lengths, alignment=st.sampled_from([1, 64, 512]), limit=st.integers(1, LIMIT))
    def take_a_hole(self, size: int, alignment: int, limit: int) -> None:
        begin = self.guard.find_hole(size, alignment, limit)
        assert begin == naive_hole(self.live, size, alignment, limit)
        if begin != limit:
            self.take(begin, begin + size)

    @rule(begin=starts)
    def release_anywhere(self, begin: int) -> None:
        assert self.guard.release(begin) == self.live.pop(begin, 0)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release_something_alive(self, data: st.DataObject) -> None:
        self.release_anywhere(data.draw(st.sampled_from(sorted(self.live))))

    @rule(begin=starts, length=lengths)
    def ask(self, begin: int, length: int) -> None:
        assert self.guard.is_free(begin, begin + length) == self.free(begin, begin + length)

    @invariant()
    def agree(self) -> None:
        assert self.guard.live_ranges() == sorted(self.live.items())
        assert self.guard.end_of_last() == max(self.live.values(), default=0)


TestGuard = Guard.TestCase
TestGuard.settings = settings(max_examples=80, stateful_step_count=60)

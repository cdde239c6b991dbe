"""Bounds on the least stall and peak, against every schedule of tiny steps."""

from __future__ import annotations

import numpy as np
from fluid_bound import fluid_stall_bound
from hypothesis import assume, example, given
from hypothesis import strategies as st
from link_bound import LinkBound
from swap_exhaustive import outcomes_of
from swap_steps import links, step_from, steps

from solvers.swap import Link, OffloadPlanner, Step
from solvers.swap.absences import absences_of
from solvers.swap.placement import place

TINY = steps(most_ops=6, most_buffers=4)
SHARES = st.floats(0, 1)


def limit_of(step: Step, share: float) -> int:
    """Return the limit at a fraction between the least feasible limit and the peak."""
    a = absences_of(step)
    floor = int((step.load - step.spread(a.last + 1, a.use, a.size)).max())
    return floor + int(share * (step.peak_bytes - floor))


def two_peaks() -> Step:
    """Operations 1 and 2 load as much as each other; buffers 0 and 3 alone are away at 2 and not at 1."""
    return step_from(
        [0.5] * 11,
        [
            (8, [(0, False), (3, False)]),
            (7, [(0, False), (2, False)]),
            (7, [(0, True), (2, False)]),
            (8, [(4, True), (14, False)]),
            (5, [(1, False), (2, False)]),
        ],
        circular=True,
        persistent={2},
    )


@given(steps(), links(), SHARES, st.integers(1, 24), st.integers(0, 2**16 - 1))
@example(two_peaks(), Link(0.0, 0.0625, 0.0, 0.5, duplex=False), 0.6, 1, 0b10010)
def test_fewer_counted_absences_never_raise_the_bound(
    step: Step, link: Link, share: float, intervals: int, some: int
) -> None:
    absences, limit = absences_of(step), limit_of(step, share)
    counted = np.array([row for row in range(len(absences)) if some >> row & 1], np.int64)
    few = fluid_stall_bound(step, link, absences, limit, intervals=intervals, counted=counted)
    every = fluid_stall_bound(step, link, absences, limit, intervals=intervals)
    assert few <= every + 1e-6 * step.duration


@given(TINY, links(), SHARES, st.integers(1, 24))
@example(step_from([1.0] * 3, [(8, [(0, False)]), (8, [(1, True)])], circular=True, persistent={0}),
         Link(0.0, 1.0, 0.0, 0.0), 0.0, 24)  # fmt: skip
def test_no_bound_exceeds_the_best_of_all_schedules(
    step: Step, link: Link, share: float, intervals: int
) -> None:
    step, limit = step.without(step.untouched), limit_of(step, share)
    outcomes = outcomes_of(step, link)
    assume(outcomes is not None)
    assert outcomes is not None
    bound = LinkBound(step, link, intervals=intervals)
    assert bound.stall_seconds(limit) <= outcomes.least(limit) + 1e-5
    parts = fluid_stall_bound(step, link, absences_of(step), limit, intervals=intervals)
    assert parts <= outcomes.least(limit) + 1e-5
    assert bound.peak_bytes() <= outcomes.peak[outcomes.stall < 1e-5].min()


def test_buffer_without_writes_is_never_copied_out() -> None:
    """The host copy is from an earlier turn, even for a buffer with a single absence."""
    buffers = [(8, [(0, False)]), (8, [(1, True)]), (4, [(0, False), (3, False)])]
    step = step_from([1.0] * 6, buffers, circular=True, persistent={0, 2})
    link = Link(0.0, 100.0, 0.0, 0.0)
    assert absences_of(step).source.tolist() == [0, 1, 2]
    planner = OffloadPlanner(step, link, least_bytes=0)
    for held in (planner.hold(12), planner.without_stall()):
        assert (held.peak_bytes, held.stall_seconds, held.replayed.moved_bytes) == (12, 0, 0)
        assert place(step, held.schedule)[1].plan.arena_bytes >= 8
    assert LinkBound(step, link).stall_seconds(12) == 0
    assert LinkBound(step, link).peak_bytes() == 12


def test_copies_longer_than_every_time_window_do_not_mislead_the_solver() -> None:
    """No buffer can be copied without waiting: 8 bytes that nothing writes come back in a second.

    With coefficients of 10**9 the solver of whole buffers proved a bound of 4.1 seconds.
    """
    step = step_from(
        [0.25, 0.5],
        [(1, [(0, False), (1, False)]), (8, [(0, False)]), (4, [(0, True)]), (7, [(1, False)])],
        persistent={0, 1, 2},
        circular=True,
    )
    link = Link(out_fixed=0.125, out_per_byte=1.0, in_fixed=0.0, in_per_byte=0.125, duplex=False)
    outcomes = outcomes_of(step, link)
    least = outcomes.stall[outcomes.peak <= 19].min()
    assert least == 1.0
    assert 0.99 < LinkBound(step, link, intervals=1).stall_seconds(19) <= least

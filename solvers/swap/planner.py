"""Search for the best offload schedule within a limit, without stall or within a stall budget."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.swap.absences import absences_of
from solvers.swap.compress import FEW, grid_of
from solvers.swap.copy_times import copied_later
from solvers.swap.published import scheduled, selected
from solvers.swap.replay import Replayed, replay
from solvers.swap.schedule import Schedule
from solvers.swap.scores import Published, our_orders
from solvers.swap.weighted_scores import search_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from solvers.swap.link import Link
    from solvers.swap.step import Step

#: Smaller buffers stay on the device: a copy's fixed cost equals the transfer time of some hundred kilobytes.
#: In a small step this would exclude every buffer, so the threshold is at most 1 / `_LEAST_SHARE` of the
#: peak.
LEAST_BYTES = 64 << 10
_LEAST_SHARE = 4096
#: Work budget of the search for one limit, in operations and absences visited; some tenths of a second.
_WORK = 150_000_000
_MOST_TRIES = 300
#: Work budget and most tries of the search for the least peak without stall: larger, because no local search
#: follows. For steps whose operations are not grouped.
_FREE_WORK, _MOST_FREE_TRIES = 600_000_000, 1000
#: Work budget of the final local search that improves the best schedule, shared by all restarts.
_IMPROVING = 100e6
_RESTARTS = 4
#: Changes that one restart must afford per absence; with fewer, the local search is skipped.
_LEAST_CHANGES = 1 / 8
#: Rounds in which the waits of a plan are fed back into the plan.
_ROUNDS = 6
#: Most work of one plan: in a large step, several absences are taken at once to stay below this budget.
_ONE_PLAN = 25_000_000
#: If planning every order in all rounds takes more work, each order gets one round and only the best gets
#: all.
_MOST_WORK = 1_500_000_000
#: Cost ratios that the search tries: a wait for a reload relative to a wait for an offload copy.
_FAVOURS = (1.0, 0.25, 4.0)


@dataclass(frozen=True, eq=False)
class Swap:
    """A schedule and the result of the replay.

    Attributes:
        limit_bytes: the requested limit.
        schedule: the moves.
        replayed: the result of replaying the schedule.
        how: the method that made the schedule, such as "early" or "published aoa".
        foretold_seconds: for plans of the native planner, the predicted stall if no host copy could be
            reused.
    """

    limit_bytes: int
    schedule: Schedule
    replayed: Replayed
    how: str
    foretold_seconds: float = float("inf")

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device."""
        return self.replayed.peak_bytes

    @property
    def stall_seconds(self) -> float:
        """Seconds by which waiting lengthens the step."""
        return self.replayed.stall_seconds


class SwapPlanner:
    """Planner of offload schedules for one step over one link. Deterministic.

    Args:
        step: the step.
        link: the copy times.
        least_bytes: smaller buffers stay on the device; by default `LEAST_BYTES`, in a small step a 4,096th
            of the peak.
        host_limit: most bytes held on the host at one time; None for no limit.
        tries: number of orders tried in addition to the scores, for one limit or for none; by default as many
            as take some tenths of a second, or without a limit up to two seconds.
        trials: number of weighted sums of the published scores tried for one limit (`search_weights`).
        few: steps of more operations are planned in groups of operations.
    """

    def __init__(
        self,
        step: Step,
        link: Link,
        *,
        least_bytes: int | None = None,
        host_limit: int | None = None,
        tries: int | None = None,
        trials: int = 0,
        few: int = FEW,
    ) -> None:
        self.step, self.link, self.host_limit = step, link, host_limit
        if least_bytes is None:
            least_bytes = min(LEAST_BYTES, step.peak_bytes // _LEAST_SHARE)
        self.absences = absences_of(step, least_bytes=least_bytes)
        self._resting = _resting(step, least_bytes, host_limit)
        self._lean = step = step.without(self._resting)
        self._grid = grid_of(step, self.absences, few=few)
        a = self._grid.absences
        self._native = self._grid.planner(step, link)
        k, n = len(self._grid.first), max(len(a), 1)
        work = min((k + 8 * n) * n, _ONE_PLAN)
        self._improves = _IMPROVING / _RESTARTS / (3 * (k + 6 * n)) >= n * _LEAST_CHANGES
        orders = 11  # ours and the published
        self._rounds = _ROUNDS if 2 * _ROUNDS * orders * work <= _MOST_WORK else 1
        self._tries = min(_MOST_TRIES, _WORK // work) if tries is None else tries
        self._free_tries = self._tries
        if tries is None and k == len(step):
            self._free_tries = min(_MOST_FREE_TRIES, _FREE_WORK // work)
        self._trials = trials
        self._free: Swap | None = None
        self._published = Published(step, link, self.absences)
        self._ours = {
            name: order.astype(np.int32) for name, order in our_orders(step, link, self.absences).items()
        }

    def floor(self) -> tuple[int, int]:
        """Return the bytes below which no limit is feasible, and the operation that needs these bytes."""
        away = self._lean.spread(self.absences.last + 1, self.absences.use, self.absences.size)
        load = self._lean.load - away
        op = int(load.argmax())
        return int(load[op]), op

    def nothing(self, limit: int) -> Swap:
        """Return the swap without any move."""
        empty = Schedule.empty()
        return Swap(limit, empty, replay(self.step, self.link, empty), "nothing")

    def _rested(self, limit: int) -> Swap:
        """Return the swap without moves in which untouched persistent buffers stay on the host."""
        return self._judged("what nothing touches", limit, Schedule.empty())

    def _judged(self, name: str, limit: int, schedule: Schedule) -> Swap:
        schedule = replace(schedule, resting=self._resting)
        return Swap(limit, schedule, replay(self.step, self.link, schedule), name)

    def hold(self, limit: int) -> Swap:
        """Hold the limit with the shortest stall found.

        Raises:
            PlanError: no schedule can hold the limit, or none was found within the host limit.
        """
        found = self._holding(limit, self._tries)
        if found is None:
            within = "" if self.host_limit is None else f" with {self.host_limit} bytes on the host"
            raise PlanError(f"no schedule found that holds {limit} bytes{within}")
        return found

    def _holding(self, limit: int, tries: int) -> Swap | None:
        if self.step.peak_bytes <= limit:
            return self.nothing(limit)
        self.check(limit)
        if self._lean.peak_bytes <= limit:
            return self._rested(limit)
        orders = self._orders(limit)
        best = self._combined(limit, self._scored(orders, limit))
        leader = orders.get("" if best is None else best.how, self._ours["early"])
        for k, order in enumerate(self._neighbours(leader, tries)):
            if best is not None and best.stall_seconds == 0:
                break
            if k % 16 == 15 and best is not None and best.how in orders:
                leader = orders[best.how]
            favour = _FAVOURS[k // 4 % len(_FAVOURS)]
            best = self._better(best, self._held(f"{k} of search", order, limit, best, favour=favour))
        if best is not None and best.stall_seconds > 0 and tries and self._improves:
            for seed in range(_RESTARTS):
                if best.stall_seconds > 0:
                    best = self._better(best, self._improved(best, seed)) or best
        return best

    def _scored(self, orders: dict[str, NDArray[np.int32]], limit: int) -> Swap | None:
        """Return the best swap of these orders and of the published planner."""
        best: Swap | None = None
        for name, order in orders.items():
            best = self._better(best, self._held(name, order, limit, best))
        for published in self.published(limit):
            best = self._better(best, published)
        if best is not None and best.how in orders and self._rounds < _ROUNDS:
            best = self._better(best, self._held(best.how, orders[best.how], limit, best, rounds=_ROUNDS))
        return best

    def nearest(self, limit: int) -> Swap:
        """Return `hold`, or on failure a swap for the lowest higher limit that is held (``limit_bytes``).

        That limit is bisected to a 256th of the peak. `check` has the error message that explains the
        failure.
        """
        peak, low = self.step.peak_bytes, max(limit, self.lowest())
        high = max(low, peak)
        if (best := self._holding(low, self._tries)) is not None:
            return best
        best = self.nothing(high)
        while high - low > max(peak // 256, 1):
            middle = (low + high) // 2
            found = self._holding(middle, 0)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return self._holding(high, self._tries) or best

    def lowest(self) -> int:
        """Return the lowest feasible limit in bytes, given the host limit."""
        floor = self.floor()[0]
        return floor if self.host_limit is None else max(floor, self.step.peak_bytes - self.host_limit)

    def without_stall(self) -> Swap:
        """Return the swap with the least peak found without any stall."""
        if self._free is None:
            self._free = self._without_stall()
        return self._free

    def _without_stall(self) -> Swap:
        peak = self._lean.peak_bytes
        best = self._rested(peak) if len(self._resting) else self.nothing(peak)
        leader = self._ours["area"]
        for name, order in {"area": leader, **self._orders(peak)}.items():
            found = self._least(name, order, best)
            if found.peak_bytes < best.peak_bytes:
                best, leader = found, order
        for k, order in enumerate(self._neighbours(leader, self._free_tries)):
            best = self._least(f"{k} of search", order, best)
        return self.published_without_stall(best)

    def within(self, slower: float) -> Swap:
        """Return the swap of least peak found with a stall of at most ``slower`` times the duration."""
        best = self.without_stall()
        low, high = self.lowest(), best.peak_bytes
        for _ in range(12):
            middle = (low + high) // 2
            if middle >= high or middle < low:
                break
            found = self._holding(middle, self._tries)
            if found is not None and found.stall_seconds <= slower * self.step.duration:
                best, high = found, found.peak_bytes
            else:
                low = middle
        return best

    def curve(self, limits: Sequence[int], *, told: Callable[[int], object] = lambda _: None) -> list[Swap]:
        """Return the best swap for each limit, in the order of the limits.

        A schedule that holds a lower limit also holds a higher one and is considered there.

        Args:
            limits: bytes.
            told: called with each limit before planning for that limit.

        Raises:
            PlanError: the lowest limit cannot be held.
        """
        found = dict[int, Swap]()
        best = self.without_stall()
        known = [best]
        for limit in sorted(set(limits)):
            told(limit)
            made = best if best.peak_bytes <= limit else self.hold(limit)
            known.append(made)
            fits = [swap for swap in known if swap.peak_bytes <= limit]
            least = min(fits, key=lambda swap: (swap.stall_seconds, swap.replayed.moved_bytes))
            if self.step.peak_bytes <= limit:
                least = self.nothing(limit)
            found[limit] = Swap(limit, least.schedule, least.replayed, least.how)
        return [found[limit] for limit in limits]

    def published(self, limit: int) -> Iterator[Swap]:
        """Yield the swaps of the published planner, one for each published score, that hold the limit."""
        for name, order in self._published_orders(limit).items():
            found = self._published_as(f"published {name}", order, limit)
            if found.peak_bytes <= limit:
                yield found

    def _published_as(self, name: str, order: NDArray[np.int32], limit: int) -> Swap:
        """Select and schedule absences in this order as published; the result may exceed the limit."""
        rows = selected(self._lean, self.absences, order.astype(np.int64), limit)
        return self._judged(name, limit, scheduled(self._lean, self.link, self.absences, rows, limit))

    def published_without_stall(self, best: Swap | None = None) -> Swap:
        """Return the swap of least peak without stall of ``best`` and the published planner.

        The published planner is tried for limits from 95 % down to half of the peak.
        """
        step, peak = self._lean, self._lean.peak_bytes
        best = best or self._rested(peak)
        for limit in (peak * np.arange(19, 9, -1) // 20).tolist():
            for name, order in self._published_orders(limit).items():
                rows = selected(step, self.absences, order.astype(np.int64), limit)
                made = scheduled(step, self.link, self.absences, rows, None)
                load = step.load - step.spread(made.release, made.fetch, step.size[made.buffer])
                if load.max() < best.peak_bytes:
                    found = self._within_host(self._judged(f"published {name}", limit, made))
                    if found and found.stall_seconds == 0:
                        best = found
        return best

    def _published_orders(self, limit: int) -> dict[str, NDArray[np.int32]]:
        orders = self._published.orders(limit)
        return {name: order.astype(np.int32) for name, order in orders.items()}

    def _orders(self, limit: int) -> dict[str, NDArray[np.int32]]:
        return {**self._ours, **self._published_orders(limit)}

    def check(self, limit: int) -> None:
        """Raise a PlanError if no schedule can hold the limit."""
        floor, op = self.floor()
        if limit < floor:
            touched = int(self.step.working_set[op])
            raise PlanError(
                f"no gain possible below {floor:,} bytes: operation {self.step.name(op)} touches "
                f"{touched:,} bytes, and {floor - touched:,} more are never away when it runs"
            )
        if self.host_limit is not None and self.step.peak_bytes - limit > self.host_limit:
            raise PlanError(
                f"{limit:,} bytes of a peak of {self.step.peak_bytes:,} leave at least "
                f"{self.step.peak_bytes - limit:,} to the host, more than its {self.host_limit:,}"
            )

    def _neighbours(self, order: NDArray[np.int32], tries: int) -> Iterator[NDArray[np.int32]]:
        """Yield random variations of an order, with some absences moved or left out."""
        random = np.random.default_rng(0)
        places = np.arange(len(order), dtype=np.float64)
        for k, turn in enumerate(itertools.islice(itertools.cycle((0.02, 0.05, 0.1, 0.3)), tries)):
            moved = places + random.normal(0, turn * len(order) + 1, len(order))
            near = order[np.argsort(moved, kind="stable")]
            # In every second dozen of tries, leave out random absences whatever their score.
            yield near[random.random(len(order)) > turn] if k // 12 % 2 else near

    def _held(
        self,
        name: str,
        order: NDArray[np.int32],
        limit: int,
        best: Swap | None = None,
        *,
        favour: float = 1.0,
        rounds: int | None = None,
    ) -> Swap | None:
        """Plan and replay this order; in a large step only if the predicted stall beats that of ``best``."""
        rows, release, fetch, stall, _ = self._native.plan(order, limit, rounds or self._rounds, favour)
        large = self._rounds < _ROUNDS
        if not np.isfinite(stall) or (large and best and stall >= best.foretold_seconds):
            return None
        return replace(self._swap(name, limit, rows, release, fetch), foretold_seconds=stall)

    def _better(self, best: Swap | None, found: Swap | None) -> Swap | None:
        """Return the swap that holds the limits with the shorter stall, then with fewer bytes moved."""
        if found is None or found.peak_bytes > found.limit_bytes or (best and _cost(found) >= _cost(best)):
            return best
        found = self._within_host(found)
        return best if found is None or (best and _cost(found) >= _cost(best)) else found

    def _combined(self, limit: int, best: Swap | None) -> Swap | None:
        """Return the best of ``best`` and of weighted sums of the published scores.

        Each sum is scheduled both as published and by the native planner.
        """
        kept = [best]

        def stall_of(order: NDArray[np.int32]) -> float:
            made = [self._held("combined", order, limit), self._published_as("combined", order, limit)]
            for found in made:
                kept[0] = self._better(kept[0], found)
            return min((one.stall_seconds for one in made if one and one.peak_bytes <= limit), default=np.inf)

        scores = {name: order for name, order in self._published_orders(limit).items() if name != "vote"}
        search_weights(scores, stall_of, trials=self._trials)
        return kept[0]

    def _improved(self, best: Swap, seed: int) -> Swap:
        """Improve a schedule with stall by small changes.

        Even seeds start from the schedule, odd seeds from all absences at full length.
        """
        a, g, s, k = self.absences, self._grid.absences, best.schedule, len(self.step)
        key, moved = a.buffer * k + a.last, s.buffer * k + s.last
        order = np.argsort(key, kind="stable")
        rows = order[np.searchsorted(key[order], moved)]
        out, release, fetch = g.last.copy(), g.last + 1, g.last + 1
        out[rows] = np.maximum(self._grid.groups(s.out, k), g.last[rows])
        release[rows] = self._grid.groups(s.release - 1, k) + 1
        fetch[rows] = self._grid.groups(s.fetch, k)
        out = np.minimum(out, release - 1)
        if seed % 2:
            out, release, fetch = g.last.copy(), g.last + 1, g.use.copy()
        work = _IMPROVING / _RESTARTS
        out, release, fetch, _ = self._native.improve(out, release, fetch, best.limit_bytes, work, seed)
        rows = np.flatnonzero(release < fetch)
        made = rows.astype(np.int32), release[rows], fetch[rows], out[rows]
        return self._swap(f"{best.how.removesuffix(', improved')}, improved", best.limit_bytes, *made)

    def varied(self, swap: Swap, seed: int) -> Swap | None:
        """Return another schedule that holds the limit without a longer stall, or None."""
        if not self._improves or not swap.stall_seconds or not len(swap.schedule):
            return None
        found = self._within_host(self._improved(swap, seed))
        if found is None or found.peak_bytes > swap.limit_bytes:
            return None
        return None if found.stall_seconds > swap.stall_seconds * (1 + 1e-9) else found

    def _within_host(self, found: Swap) -> Swap | None:
        """Return ``found`` within the host limit, if need be with later copies, or None if impossible."""
        if self.host_limit is None or found.replayed.host_bytes <= self.host_limit:
            return found
        later = copied_later(self.step, self.link, found.schedule, found.replayed.wait)
        made = Swap(found.limit_bytes, later, replay(self.step, self.link, later), found.how)
        return made if made.replayed.host_bytes <= self.host_limit else None

    def _least(self, name: str, order: NDArray[np.int32], best: Swap) -> Swap:
        """Return the swap of least peak that this order reaches without stall, or ``best`` if lower."""
        low, high = self.lowest() - 1, best.peak_bytes
        made = None
        target = high - high // 1000 - 1
        while low < target:
            rows, release, fetch, _, peak = self._native.without_waiting(order, target)
            if peak < high:
                made, high = (rows, release, fetch), int(peak)
            elif made is None:
                return best
            if peak > target:
                low = target
            target = (low + high) // 2
            if high - low <= high // 2000:
                break
        if made is None:
            return best
        found = self._within_host(self._swap(name, high, *made))
        return found if found and found.stall_seconds == 0 and found.peak_bytes < best.peak_bytes else best

    def _swap(
        self,
        name: str,
        limit: int,
        rows: NDArray[np.int32],
        release: NDArray[np.int64],
        fetch: NDArray[np.int64],
        out: NDArray[np.int64] | None = None,
    ) -> Swap:
        """Convert native columns to a schedule on the step's own operations and replay that schedule."""
        order = np.argsort(self.absences.use[rows], kind="stable")
        rows, k, a = rows[order], len(self.step), self.absences
        source, asked = a.source[rows], a.last[rows]
        if out is not None:  # asked for when the group ends
            ended = self._grid.operations(out[order] + 1, k) - 1
            asked = np.where(out[order] > self._grid.absences.last[rows], ended, asked)
        schedule = Schedule(
            a.buffer[rows],
            a.last[rows],
            asked,
            self._grid.operations(release[order], k),
            self._grid.operations(fetch[order], k),
            a.use[rows],
            (source < 0) | ~np.isin(source, rows),
        )
        return self._judged(name, limit, schedule)


def _resting(step: Step, least_bytes: int, host_limit: int | None) -> NDArray[np.int64]:
    """Return the rows of untouched persistent buffers that can stay on the host, the largest first."""
    rows = step.untouched[step.size[step.untouched] >= least_bytes]
    rows = rows[np.argsort(-step.size[rows], kind="stable")]
    return rows if host_limit is None else rows[np.cumsum(step.size[rows]) <= host_limit]


def _cost(swap: Swap) -> tuple[float, int]:
    return swap.stall_seconds, swap.replayed.moved_bytes + swap.replayed.returned_bytes

"""Search for the best offload schedule: within a limit, without stall, or within a stall budget."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from solvers.errors import PlanError
from solvers.swap.absences import absence_orders, absences_of
from solvers.swap.operation_groups import group_operations
from solvers.swap.replay import replay
from solvers.swap.schedule import PlannedSchedule, Schedule
from solvers.swap.transfer_times import delay_offloads
from solvers.swap.tunables import DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from solvers.swap.link import Link
    from solvers.swap.step import Step
    from solvers.swap.tunables import OffloadTunables


class OffloadPlanner:
    """Planner of offload schedules for one step over one link. Deterministic.

    Args:
        step: the step.
        link: the copy times.
        least_bytes: smaller buffers stay on the device; the default is a tunable.
        host_limit: most bytes held on the host at one time; None for no limit.
        tries: number of orders tried in addition to `absence_orders`; by default tenths of a second of work
            with a limit, and up to two seconds without.
        tunables: the budgets of the search.
    """

    def __init__(
        self,
        step: Step,
        link: Link,
        *,
        least_bytes: int | None = None,
        host_limit: int | None = None,
        tries: int | None = None,
        tunables: OffloadTunables = DEFAULTS,
    ) -> None:
        self.step, self.link, self.host_limit, self.tunables = step, link, host_limit, tunables
        if least_bytes is None:
            least_bytes = min(tunables.least_bytes, step.peak_bytes // tunables.least_share)
        self.absences = absences_of(step, least_bytes=least_bytes)
        self._resting = _resting(step, least_bytes, host_limit)
        self._lean = step = step.without(self._resting)
        self._groups = group_operations(step, self.absences, most_ungrouped=tunables.ungrouped_operations)
        self._native = self._groups.native_planner(step, link)
        self._orders = absence_orders(step, link, self.absences)
        self._budget(tries)
        self._free: PlannedSchedule | None = None

    def _budget(self, tries: int | None) -> None:
        """Set the rounds and tries from the work of one plan."""
        k, n, t = len(self._groups.first), max(len(self.absences), 1), self.tunables
        work = min((k + 8 * n) * n, t.schedule_work)
        self._improves = t.improve_work / t.restarts / (3 * (k + 6 * n)) >= n * t.least_changes
        self._rounds = t.rounds if work <= t.full_rounds_work else 1
        self._tries = min(t.limit_tries, t.limit_work // work) if tries is None else tries
        self._free_tries = self._tries
        if tries is None and k == len(self.step):
            self._free_tries = min(t.free_tries, t.free_work // work)

    def floor(self) -> tuple[int, int]:
        """Return the least bytes of any feasible limit, and the operation that needs these bytes."""
        away = self._lean.spread(self.absences.last + 1, self.absences.use, self.absences.size)
        load = self._lean.load - away
        op = int(load.argmax())
        return int(load[op]), op

    def without_moves(self, limit: int) -> PlannedSchedule:
        """Return the schedule without any move."""
        empty = Schedule.empty()
        return PlannedSchedule(limit, empty, replay(self.step, self.link, empty), "without moves")

    def _untouched_away(self, limit: int) -> PlannedSchedule:
        """Return the schedule without moves in which untouched persistent buffers stay on the host."""
        return self._judge("untouched buffers on the host", limit, Schedule.empty())

    def _judge(self, name: str, limit: int, schedule: Schedule) -> PlannedSchedule:
        schedule = replace(schedule, resting=self._resting)
        return PlannedSchedule(limit, schedule, replay(self.step, self.link, schedule), name)

    def hold(self, limit: int) -> PlannedSchedule:
        """Return the schedule within the limit with the shortest stall found.

        Raises:
            PlanError: the limit is infeasible, or no schedule was found within the host limit.
        """
        found = self._search(limit, self._tries)
        if found is None:
            within = "" if self.host_limit is None else f" with {self.host_limit} bytes on the host"
            raise PlanError(f"no schedule found that holds {limit} bytes{within}")
        return found

    def _search(self, limit: int, tries: int) -> PlannedSchedule | None:
        if self.step.peak_bytes <= limit:
            return self.without_moves(limit)
        self.check_limit(limit)
        if self._lean.peak_bytes <= limit:
            return self._untouched_away(limit)
        best = self._best_order(limit)
        leader = self._orders.get("" if best is None else best.method, self._orders["early"])
        for k, order in enumerate(self._neighbours(leader, tries)):
            if best is not None and best.stall_seconds == 0:
                break
            if k % 16 == 15 and best is not None:
                leader = self._orders.get(best.method, leader)
            best = self._better(best, self._plan_order(f"{k} of search", order, limit, best))
        if best is not None and best.stall_seconds > 0 and tries and self._improves:
            for seed in range(self.tunables.restarts):
                if best.stall_seconds > 0:
                    best = self._better(best, self._improve(best, seed)) or best
        return best

    def _best_order(self, limit: int) -> PlannedSchedule | None:
        """Return the best schedule of the orders by score."""
        best: PlannedSchedule | None = None
        for name, order in self._orders.items():
            best = self._better(best, self._plan_order(name, order, limit, best))
        if best is not None and self._rounds < self.tunables.rounds:
            order = self._orders[best.method]
            best = self._better(
                best, self._plan_order(best.method, order, limit, best, rounds=self.tunables.rounds)
            )
        return best

    def nearest(self, limit: int) -> PlannedSchedule:
        """Return `hold`, or on failure a schedule for the lowest feasible higher limit (its ``limit_bytes``).

        The higher limit is bisected to a 256th of the peak. `check_limit` raises the error that explains the
        failure.
        """
        peak, low = self.step.peak_bytes, max(limit, self.lowest_limit())
        high = max(low, peak)
        if (best := self._search(low, self._tries)) is not None:
            return best
        best = self.without_moves(high)
        while high - low > max(peak // 256, 1):
            middle = (low + high) // 2
            found = self._search(middle, 0)
            if found is None:
                low = middle
            else:
                best, high = found, middle
        return self._search(high, self._tries) or best

    def alternatives(self, limit: int) -> list[PlannedSchedule]:
        """Return different schedules that hold a limit, the shortest stall first; empty without moves."""
        if limit < self.lowest_limit() or self._lean.peak_bytes <= limit:
            return []
        found = [self._plan_order(name, order, limit) for name, order in self._orders.items()]
        leader = min((one for one in found if one is not None), key=self._cost, default=None)
        if leader is not None:
            orders = self._neighbours(
                self._orders[leader.method], self._tries // self.tunables.alternative_tries_divisor
            )
            found += [self._plan_order(f"{k} of search", order, limit) for k, order in enumerate(orders)]
        held = (self._within_host(one) for one in found if one is not None and one.peak_bytes <= limit)
        different: dict[tuple[float, int], PlannedSchedule] = {}
        for one in sorted((one for one in held if one is not None), key=self._cost):
            different.setdefault((round(one.stall_seconds, 7), len(one.schedule)), one)
        return list(different.values())

    def lowest_limit(self) -> int:
        """Return the lowest feasible limit in bytes, given the host limit."""
        floor = self.floor()[0]
        return floor if self.host_limit is None else max(floor, self.step.peak_bytes - self.host_limit)

    def without_stall(self) -> PlannedSchedule:
        """Return the schedule with the lowest peak found without stall."""
        if self._free is None:
            self._free = self._without_stall()
        return self._free

    def _without_stall(self) -> PlannedSchedule:
        peak = self._lean.peak_bytes
        best = self._untouched_away(peak) if len(self._resting) else self.without_moves(peak)
        leader = self._orders["area"]
        for name, order in {"area": leader, **self._orders}.items():
            found = self._least_peak(name, order, best)
            if found.peak_bytes < best.peak_bytes:
                best, leader = found, order
        for k, order in enumerate(self._neighbours(leader, self._free_tries)):
            best = self._least_peak(f"{k} of search", order, best)
        return best

    def within_slowdown(self, slower: float) -> PlannedSchedule:
        """Return the schedule with the lowest peak found whose stall is at most ``slower`` times the step."""
        best = self.without_stall()
        low, high = self.lowest_limit(), best.peak_bytes
        for _ in range(12):
            middle = (low + high) // 2
            if middle >= high or middle < low:
                break
            found = self._search(middle, self._tries)
            if found is not None and found.stall_seconds <= slower * self.step.duration:
                best, high = found, found.peak_bytes
            else:
                low = middle
        return best

    def curve(
        self, limits: Sequence[int], *, on_limit: Callable[[int], object] = lambda _: None
    ) -> list[PlannedSchedule]:
        """Return the best schedule for each limit, in the order of the limits.

        A schedule for a lower limit is considered for higher limits, too.

        Args:
            limits: bytes.
            on_limit: called with each limit before planning for that limit.

        Raises:
            PlanError: the lowest limit is infeasible.
        """
        found = dict[int, PlannedSchedule]()
        best = self.without_stall()
        known = [best]
        for limit in sorted(set(limits)):
            on_limit(limit)
            made = best if best.peak_bytes <= limit else self.hold(limit)
            known.append(made)
            fits = [planned for planned in known if planned.peak_bytes <= limit]
            least = min(fits, key=self._cost)
            if self.step.peak_bytes <= limit:
                least = self.without_moves(limit)
            found[limit] = PlannedSchedule(limit, least.schedule, least.replayed, least.method)
        return [found[limit] for limit in limits]

    def check_limit(self, limit: int) -> None:
        """Raise a PlanError if the limit is infeasible."""
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
        """Yield random variations of an order, with some absences moved or omitted."""
        random = np.random.default_rng(0)
        places = np.arange(len(order), dtype=np.float64)
        for k, turn in enumerate(itertools.islice(itertools.cycle((0.02, 0.05, 0.1, 0.3)), tries)):
            moved = places + random.normal(0, turn * len(order) + 1, len(order))
            near = order[np.argsort(moved, kind="stable")]
            # In every second dozen of tries, omit random absences of any score.
            yield near[random.random(len(order)) > turn] if k // 12 % 2 else near

    def _plan_order(
        self,
        name: str,
        order: NDArray[np.int32],
        limit: int,
        best: PlannedSchedule | None = None,
        *,
        rounds: int | None = None,
    ) -> PlannedSchedule | None:
        """Plan and replay this order.

        In a large step, only if the predicted stall is below that of ``best``.
        """
        rows, release, fetch, stall, _ = self._native.plan(order, limit, rounds or self._rounds)
        large = self._rounds < self.tunables.rounds
        if not np.isfinite(stall):
            return None
        if large and best and (stall, len(rows)) >= (best.predicted_stall, len(best.schedule)):
            return None
        return replace(self._schedule(name, limit, rows, release, fetch), predicted_stall=stall)

    def _better(self, best: PlannedSchedule | None, found: PlannedSchedule | None) -> PlannedSchedule | None:
        """Return the schedule that holds the limits with the lower cost."""
        if found is not None and self._is_better(found, best):
            found = self._within_host(found)
        return found if found is not None and self._is_better(found, best) else best

    def _is_better(self, found: PlannedSchedule, best: PlannedSchedule | None) -> bool:
        """Return whether a schedule holds its limit at a lower cost than ``best``, host memory aside."""
        return found.peak_bytes <= found.limit_bytes and (
            best is None or self._cost(found) < self._cost(best)
        )

    def _cost(self, planned: PlannedSchedule) -> tuple[float, int]:
        """Return the stall in seconds, then the bytes moved plus the price of each move in bytes."""
        did, moves = planned.replayed, len(planned.schedule)
        return planned.stall_seconds, did.moved_bytes + did.returned_bytes + moves * self.tunables.move_bytes

    def _improve(self, best: PlannedSchedule, seed: int) -> PlannedSchedule:
        """Improve a schedule with stall by small changes.

        Even seeds start from the schedule, odd seeds from all absences at full length.
        """
        a, g, s, k = self.absences, self._groups.absences, best.schedule, len(self.step)
        key, moved = a.buffer * k + a.last, s.buffer * k + s.last
        order = np.argsort(key, kind="stable")
        rows = order[np.searchsorted(key[order], moved)]
        out, release, fetch = g.last.copy(), g.last + 1, g.last + 1
        out[rows] = np.maximum(self._groups.groups(s.out, k), g.last[rows])
        release[rows] = self._groups.groups(s.release - 1, k) + 1
        fetch[rows] = self._groups.groups(s.fetch, k)
        out = np.minimum(out, release - 1)
        if seed % 2:
            out, release, fetch = g.last.copy(), g.last + 1, g.use.copy()
        work = self.tunables.improve_work / self.tunables.restarts
        out, release, fetch, _ = self._native.improve(out, release, fetch, best.limit_bytes, work, seed)
        rows = np.flatnonzero(release < fetch)
        made = rows.astype(np.int32), release[rows], fetch[rows], out[rows]
        return self._schedule(f"{best.method.removesuffix(', improved')}, improved", best.limit_bytes, *made)

    def variation(self, planned: PlannedSchedule, seed: int) -> PlannedSchedule | None:
        """Return another schedule that holds the limit without a longer stall, or None."""
        if not self._improves or not planned.stall_seconds or not len(planned.schedule):
            return None
        found = self._within_host(self._improve(planned, seed))
        if found is None or found.peak_bytes > planned.limit_bytes:
            return None
        return None if found.stall_seconds > planned.stall_seconds * (1 + 1e-9) else found

    def _within_host(self, found: PlannedSchedule) -> PlannedSchedule | None:
        """Return ``found`` within the host limit, if necessary with later copies, or None if impossible."""
        if self.host_limit is None or found.replayed.host_bytes <= self.host_limit:
            return found
        later = delay_offloads(self.step, self.link, found.schedule, found.replayed.wait)
        made = PlannedSchedule(found.limit_bytes, later, replay(self.step, self.link, later), found.method)
        return made if made.replayed.host_bytes <= self.host_limit else None

    def _least_peak(self, name: str, order: NDArray[np.int32], best: PlannedSchedule) -> PlannedSchedule:
        """Return the schedule of this order with the lowest peak without stall, or ``best`` if lower."""
        low, high = self.lowest_limit() - 1, best.peak_bytes
        made = None
        target = high - high // 1000 - 1
        while low < target:
            rows, release, fetch, _, peak = self._native.select_without_stall(order, target)
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
        found = self._within_host(self._schedule(name, high, *made))
        return found if found and found.stall_seconds == 0 and found.peak_bytes < best.peak_bytes else best

    def _schedule(
        self,
        name: str,
        limit: int,
        rows: NDArray[np.int32],
        release: NDArray[np.int64],
        fetch: NDArray[np.int64],
        out: NDArray[np.int64] | None = None,
    ) -> PlannedSchedule:
        """Convert native columns to a schedule of the step's operations, and replay the schedule."""
        order = np.argsort(self.absences.use[rows], kind="stable")
        rows, k, a = rows[order], len(self.step), self.absences
        source, asked = a.source[rows], a.last[rows]
        if out is not None:  # requested at the group's end
            ended = self._groups.operations(out[order] + 1, k) - 1
            asked = np.where(out[order] > self._groups.absences.last[rows], ended, asked)
        schedule = Schedule(
            a.buffer[rows],
            a.last[rows],
            asked,
            self._groups.operations(release[order], k),
            self._groups.operations(fetch[order], k),
            a.use[rows],
            (source < 0) | ~np.isin(source, rows),
        )
        return self._judge(name, limit, schedule)


def _resting(step: Step, least_bytes: int, host_limit: int | None) -> NDArray[np.int64]:
    """Return the rows of untouched persistent buffers that can stay on the host, the largest first."""
    rows = step.untouched[step.size[step.untouched] >= least_bytes]
    rows = rows[np.argsort(-step.size[rows], kind="stable")]
    return rows if host_limit is None else rows[np.cumsum(step.size[rows]) <= host_limit]

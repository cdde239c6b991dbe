"""Fake runs of changed jobs, each done once, and their savings."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mempool.analysis.remedies import Remedy
from mempool.torch.estimate.largest_batch import largest, largest_batch
from mempool.torch.estimate.measure import reserved
from mempool.torch.estimate.remedies.changes import KINDS, Change, Ladder, applied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mempool.torch.estimate.fit import Fit
    from mempool.torch.estimate.training_step import Job


@dataclass(frozen=True)
class Help(Remedy):
    """One change, or several together, tried. Bytes throughout.

    Attributes:
        name: a few words.
        saves_bytes: reduction of the device memory needed: reserved by the allocator, and margins.
        how: description and price.
        code: lines to write in the user's program.
        needed_bytes: device memory needed after the change.
        peak_bytes: peak load after the change.
        saves_peak_bytes: reduction of the peak load; may be negative.
        reserved_bytes: bytes reserved after the change, by the fit's allocator, or by the allocator that the
            change sets.
        saves_reserved_bytes: reduction of the reserved bytes.
        peak_phase: phase of the peak after the change; likewise ``peak_operation``.
        fits: whether the changed job fits; None without a limit.
        cost: name of a `mempool.torch.estimate.remedies.changes.Cost`, in lower case.
        recomputes: share of the forward's operations that run twice; None if the change recomputes nothing.
        largest_batch: largest batch that fits after the change; None without a search.
        parts: names of the combined changes.
    """

    code: str
    needed_bytes: int
    peak_bytes: int
    saves_peak_bytes: int
    reserved_bytes: int
    saves_reserved_bytes: int
    peak_phase: str
    peak_operation: str
    fits: bool | None
    cost: str
    recomputes: float | None = None
    largest_batch: int | None = None
    parts: tuple[str, ...] = ()


class Trials:
    """Fake runs of changed jobs, each cached.

    Args:
        job: the job to change.
        fit: result of the unchanged job.
        most_runs: largest number of runs of changed jobs.
        until: processor time of the process, in seconds, after which no run begins.
        told: called with the name of each trial.
    """

    def __init__(
        self, job: Job, fit: Fit, most_runs: int, until: float, told: Callable[[str], object]
    ) -> None:
        self.job, self.fit, self.told = job, fit, told
        self._left, self._until = most_runs, until
        self._runs: dict[tuple[str, ...], Fit | None] = {(): fit}
        self._changes: dict[str, Change] = {}
        self._why: dict[str, str] = {}

    def alone(self, ladder: Ladder) -> Help | None:
        """Try a change alone, just as strong as needed if the needed saving is known."""
        if ladder.strongest.phase not in (None, self.fit.peak_phase):
            return None if self.fit.fits is not False else self._nothing(ladder.strongest)
        if self.fit.fits is not False:
            return self.tried([ladder.steps[ladder.usual]])
        best = self.tried([ladder.strongest])
        return self.tried([self.weakest(ladder, []).strongest]) if best and best.fits else best

    def tried(self, changes: Sequence[Change]) -> Help | None:
        """Try changes of different kinds together; return None if they could not be tried."""
        changes = sorted(changes, key=lambda one: KINDS.index(one.kind))
        self._changes |= {change.name: change for change in changes}
        made = self._run([change for change in changes if change.allocator is None])
        return None if made is None else self._help(changes, made)

    def run_of(self, changes: Sequence[Change]) -> Fit | None:
        """Return the full result of the run made for `tried`."""
        return self._run(sorted(changes, key=lambda one: KINDS.index(one.kind)))

    def goes_on(self) -> bool:
        """Return whether time is left for another run."""
        return time.process_time() <= self._until

    def failed(self) -> list[tuple[str, str]]:
        """Return the changes that could not be tried, with reasons."""
        return list(self._why.items())

    def weakest(self, ladder: Ladder, others: Sequence[Change]) -> Ladder:
        """Return the ladder up to the weakest step that fits with other changes; the strongest must fit."""
        count, limit = len(ladder.steps), self.fit.limit_bytes or 0
        if count == 1:
            return ladder

        def needs(weakness: int) -> int:
            tried = None if weakness > count else self.tried([ladder.steps[count - weakness], *others])
            return max(limit + 1, self.fit.needed_bytes) if tried is None else tried.needed_bytes

        return Ladder(ladder.steps[: count + 1 - max(1, largest(needs, limit))])

    def with_largest(self, found: Help) -> Help:
        """Return the remedy with the largest batch that fits."""
        changes = [self._changes[name] for name in found.parts]
        limit = self.fit.limit_bytes
        if limit is None or any(change.kind == "batch" for change in changes):
            return found
        self.told(f"largest batch: {found.name}")
        job = applied(self.job, changes)
        most = largest_batch(job, limit, self._allocator(changes), known={job.batch: found.needed_bytes})
        return replace(found, largest_batch=most)

    def _allocator(self, changes: Iterable[Change]) -> str:
        return next((one.allocator for one in changes if one.allocator), self.fit.allocator)

    def _run(self, changes: Sequence[Change]) -> Fit | None:
        key = tuple(change.name for change in changes)
        if key not in self._runs:
            self._runs[key] = self._try(" + ".join(key), changes)
        return self._runs[key]

    def _try(self, name: str, changes: Sequence[Change]) -> Fit | None:
        from mempool.torch.estimate.fit import fit_job

        if self._left <= 0 or time.process_time() > self._until:
            self._why[name] = "no runs are left" if self._left <= 0 else "no time is left"
            return None
        self._left -= 1
        self.told(name)
        try:
            return fit_job(
                applied(self.job, changes),
                self.fit.limit_bytes,
                allocators=(self.fit.allocator,),
                remedies=False,
                largest=False,
            )
        except Exception as error:
            self._why[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            return None

    def _help(self, changes: Sequence[Change], made: Fit) -> Help:
        before, limit = self.fit, self.fit.limit_bytes
        allocator = self._allocator(changes)
        held = made.reserved_bytes.get(allocator)
        if held is None:
            held = made.reserved_bytes[allocator] = reserved(made.trace, [allocator])[allocator]
        needed = held + sum(made.margin_bytes.values())
        shares = [change.recomputes for change in changes if change.recomputes is not None]
        return Help(
            name=" + ".join(change.name for change in changes),
            saves_bytes=before.needed_bytes - needed,
            how="; ".join(change.how for change in changes),
            code="\n".join(change.code for change in changes),
            needed_bytes=needed,
            peak_bytes=made.peak_bytes,
            saves_peak_bytes=before.peak_bytes - made.peak_bytes,
            reserved_bytes=held,
            saves_reserved_bytes=before.reserved_bytes[before.allocator] - held,
            peak_phase=made.peak_phase,
            peak_operation=made.peak_operation,
            fits=None if limit is None else needed <= limit,
            cost=max(change.cost for change in changes).name.lower(),
            recomputes=sum(shares) if shares else None,
            parts=tuple(change.name for change in changes),
        )

    def _nothing(self, change: Change) -> Help:
        """Return the zero saving of a change that does not affect the phase of the peak."""
        return self._help([change], self.fit)

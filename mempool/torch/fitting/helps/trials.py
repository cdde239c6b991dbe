"""Runs of a changed job, each once, and what they save."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mempool.analysis.remedies import Remedy
from mempool.torch.fitting.batches import largest, largest_batch
from mempool.torch.fitting.helps.changes import KINDS, Change, Ladder, applied
from mempool.torch.fitting.measure import reserved

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mempool.torch.fitting.fit import Fit
    from mempool.torch.fitting.job import Job


@dataclass(frozen=True)
class Help(Remedy):
    """One change, or several together, tried. Bytes throughout.

    Attributes:
        name: of a few words.
        saves_bytes: of what the job needs of the device: reserved by the allocator, and margins.
        how: what it is, and its price.
        code: what to write in one's own program.
        needed_bytes: with it.
        peak_bytes: with it.
        saves_peak_bytes: of the peak load; may be less than zero.
        reserved_bytes: with it, by the allocator that counts, or by the one that it is.
        saves_reserved_bytes: likewise.
        peak_phase: where the peak then is; likewise ``peak_operation``.
        fits: whether it then fits; None where there is no limit.
        cost: what it costs, as `mempool.torch.fitting.helps.changes.Cost` names it.
        recomputes: share of the forward's operations that run twice, None where there are none.
        largest_batch: that fits with it, None where it was not looked for.
        parts: names of the changes that it is made of.
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
    """Runs of changed jobs.

    Args:
        job: what is changed.
        fit: what came of it as it is.
        most_runs: of changed jobs.
        until: processor time of the process, in seconds, after which none begins.
        told: called with the name of what is being tried.
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
        """What comes of a change alone, just as strong as is needed where that is known."""
        if ladder.strongest.phase not in (None, self.fit.peak_phase):
            return None if self.fit.fits is not False else self._nothing(ladder.strongest)
        if self.fit.fits is not False:
            return self.tried([ladder.steps[ladder.usual]])
        best = self.tried([ladder.strongest])
        return self.tried([self.weakest(ladder, []).strongest]) if best and best.fits else best

    def tried(self, changes: Sequence[Change]) -> Help | None:
        """What comes of changes of different kinds; None where they could not be tried."""
        changes = sorted(changes, key=lambda one: KINDS.index(one.kind))
        self._changes |= {change.name: change for change in changes}
        made = self._run([change for change in changes if change.allocator is None])
        return None if made is None else self._help(changes, made)

    def run_of(self, changes: Sequence[Change]) -> Fit | None:
        """What `tried` has found of changes, whole."""
        return self._run(sorted(changes, key=lambda one: KINDS.index(one.kind)))

    def goes_on(self) -> bool:
        """Whether there is time for more."""
        return time.process_time() <= self._until

    def failed(self) -> list[tuple[str, str]]:
        """What could not be tried, and why."""
        return list(self._why.items())

    def weakest(self, ladder: Ladder, others: Sequence[Change]) -> Ladder:
        """The ladder up to its weakest step that fits together with others; its last one does."""
        count, limit = len(ladder.steps), self.fit.limit_bytes or 0
        if count == 1:
            return ladder

        def needs(weakness: int) -> int:
            tried = None if weakness > count else self.tried([ladder.steps[count - weakness], *others])
            return max(limit + 1, self.fit.needed_bytes) if tried is None else tried.needed_bytes

        return Ladder(ladder.steps[: count + 1 - max(1, largest(needs, limit))])

    def with_largest(self, found: Help) -> Help:
        """The same with the largest batch that fits."""
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
        from mempool.torch.fitting.fit import fit_job

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
        """What a change saves that has nothing to do with the phase of the peak."""
        return self._help([change], self.fit)

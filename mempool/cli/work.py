"""What a file given to a verb holds: events, the buffers of a CSV, or a plan with its buffers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import typer

from mempool.cli.devices import device_of
from mempool.cli.output import ExitCode, Stop, error_line

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from mempool.cli.devices import Several
    from solvers import Plan
    from traces import Buffers, Trace
    from traces.pattern import Pattern


@dataclass(frozen=True)
class Work:
    """The content of one file.

    Attributes:
        kind: what the file is.
        buffers: what is, or was, to be placed.
        trace: the events, if the file is a trace: those of ``device``.
        pattern: the iteration that most of the trace repeats, or, where marks tell several kinds apart, the
            one with the largest peak load; None if there is none or it was not asked for.
        others: the other kinds, those first that most of the trace repeats.
        minor: an iteration that was passed over, being no main part of the trace.
        plan: of a plan file, or of a CSV that has an offset for every buffer.
        skipped: how many events were left out, by reason; None where the first would have been an error.
        file: all events of a trace, of whatever device.
        device: the one that was chosen, or the only one; None where all count together.
    """

    kind: Literal["trace", "plan", "csv"]
    buffers: Buffers
    trace: Trace | None = None
    pattern: Pattern | None = None
    others: tuple[Pattern, ...] = ()
    minor: Pattern | None = None
    plan: Plan | None = None
    skipped: Counter[str] | None = None
    file: Trace | None = None
    device: int | None = None

    @property
    def begins(self) -> NDArray[np.int64]:
        """Rows of ``file`` at which iterations of any kind begin, int64[k], in order; empty without one."""
        if self.pattern is None:
            return np.empty(0, np.int64)
        begins: NDArray[np.int64] = np.sort(
            np.concatenate([one.begins for one in (self.pattern, *self.others)])
        )
        if self.file is None or self.device is None or self.trace is self.file:
            return begins
        in_file: NDArray[np.int64] = self.file.rows_on_device(self.device)[begins]
        return in_file


def read_work(
    path: Path,
    *,
    whole: bool = False,
    main: bool = False,
    alignment: int = 1,
    lenient: bool = False,
    device: int | None = None,
    several: Several = "together",
    progress: Callable[[int, int], object] | None = None,
) -> Work:
    """Read a file of events in any format, a plan or a MiniMalloc CSV, by content.

    Args:
        path: the file.
        whole: of a trace, take all events on one line rather than the iteration that they repeat.
        main: take an iteration only if it is `mempool.cli.main_part.is_main`, else the whole.
        alignment: of the buffers of a trace, in bytes, where its recorder did not ask for more.
        lenient: leave out events that cannot be, and say on stderr how many.
        device: of a trace, take the events of this device only.
        several: as of `mempool.cli.devices.device_of`.
        progress: as of `traces.read.read`.

    Raises:
        TraceError, PlanError: the file is not what it says it is.
        OSError: the file cannot be opened.
        typer.BadParameter: there is no such device, or one must be named.
    """
    skipped = Counter[str]() if lenient else None
    try:
        file = _read(path, skipped, progress)
    except OSError as error:
        if error.filename is None:  # of reading, not of opening
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise
    if isinstance(file, Work):
        if device is not None:
            raise typer.BadParameter(f"{path} is a {file.kind}, which has no devices", param_hint="--device")
        return file
    chosen = device_of(path, file, device, several)
    trace = file if chosen is None or len(file.devices) == 1 else file.on_device(chosen)
    work = _of_trace(path, trace, whole=whole, main=main, alignment=alignment)
    return dataclasses.replace(work, skipped=skipped, file=file, device=chosen)


def _read(
    path: Path, skipped: Counter[str] | None, progress: Callable[[int, int], object] | None
) -> Trace | Work:
    """The events of a file, or its buffers where it has none."""
    from traces.files import sniff
    from traces.read import read

    kind = sniff(path)
    if kind == "csv":
        return dataclasses.replace(_read_csv(path), skipped=skipped)
    if kind == "plan":
        from solvers import read_plan

        plan, buffers, *_ = read_plan(path)
        return Work("plan", buffers, plan=plan, skipped=skipped)
    trace = read(path, skipped=skipped, progress=progress)
    tell_skipped(path, skipped)
    return trace


def tell_skipped(path: Path | str, skipped: Counter[str] | None) -> None:
    """One line on stderr about what was left out, if anything was."""
    if skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())
        events = "event" if skipped.total() == 1 else "events"
        error_line(f"{path}: {skipped.total():,} {events} left out: {reasons}")


def require_history(path: Path, work: Work) -> None:
    """Say on stderr what a trace withholds, before a plan is made of it.

    Raises:
        Stop: there are no events, only the state at the end.
    """
    from mempool.analysis.caveats import caveats
    from traces.completeness import History, completeness

    if work.trace is None or work.device is None:
        return
    known = caveats(work.trace, work.device)
    if completeness(work.trace, work.device).history is History.ABSENT:
        raise Stop(ExitCode.FILE, f"{path}: nothing to plan: {known[0]}")
    for sentence in known:
        error_line(f"{path}: {sentence}")


def _of_trace(path: Path, trace: Trace, *, whole: bool, main: bool, alignment: int) -> Work:
    from mempool.cli.main_part import found_only, is_main
    from solvers import peak_load
    from traces import buffers_of

    kinds: list[Pattern] = []
    if not whole:
        kinds = _kinds(trace, max(alignment, trace.alignment))
        # What was detected says more than steps of an optimizer, which may be a small part.
        if found_only(trace) and not (kinds and is_main(kinds, trace)):
            by_steps = _kinds(trace, max(alignment, trace.alignment), found=True)
            kinds = by_steps if by_steps and is_main(by_steps, trace) else kinds
    for one in kinds:
        _check_sums(path, one.buffers)
    most = max(kinds, key=lambda one: peak_load(one.buffers), default=None)
    if most is None or (main and not is_main(kinds, trace)):
        linear = buffers_of(trace, alignment=alignment)
        _check_sums(path, linear)
        return Work("trace", linear, trace, minor=most)
    others = tuple(one for one in kinds if one is not most)
    return Work("trace", most.buffers, trace, most, others)


def _kinds(trace: Trace, alignment: int, *, found: bool = False) -> list[Pattern]:
    """Those that most of the trace repeats first; several only where marks tell them apart."""
    from mempool.known_plans import MOST_KNOWN
    from traces.pattern import find_patterns

    patterns = find_patterns(trace, anywhere=True, enveloped=(), found=found)
    patterns.sort(key=lambda one: -one.iterations * len(one.buffers))
    return [_aligned(one, alignment) for one in patterns[:MOST_KNOWN]]


def _aligned(pattern: Pattern, alignment: int) -> Pattern:
    column = np.full(len(pattern.buffers), alignment, np.int64)
    return dataclasses.replace(pattern, buffers=dataclasses.replace(pattern.buffers, alignment=column))


def _read_csv(path: Path) -> Work:
    from traces.minimalloc import read_csv

    buffers = read_csv(path)
    _check_sums(path, buffers)
    if len(buffers) and (buffers.offset >= 0).all():
        return Work("csv", buffers, plan=solution(buffers))
    return Work("csv", buffers)


def _check_sums(path: Path, buffers: Buffers) -> None:
    """Loads and addresses are int64: what they can add up to must fit.

    Raises:
        TraceError: it does not.
    """
    from traces import TraceError

    needed = sum(buffers.size.tolist()) + sum(buffers.alignment.tolist())
    if needed + int(buffers.offset.max(initial=0)) >= 2**62:
        raise TraceError(f"{path}: sizes, alignments and offsets add up to 2**62 bytes or more")


def arenas(plan: Plan, buffers: Buffers) -> list[dict[str, int]] | None:
    """What lies in each of several arenas; None where there is one."""
    if not plan.arenas or plan.offset is None:
        return None
    arena, offset = plan.in_arenas()
    taking = ~buffers.persistent & (buffers.size > 0)
    tops = np.where(taking[:, None], offset + buffers.size[:, None], 0)
    return [
        {
            "capacity_bytes": capacity,
            "used_bytes": int(tops[arena == k].max(initial=0)),
            "buffers": int((taking & (arena == k).any(axis=1)).sum()),
        }
        for k, capacity in enumerate(plan.arenas)
    ]


def solution(buffers: Buffers) -> Plan:
    """The plan that fixed offsets amount to; nothing is checked."""
    from solvers import Plan, Status, lower_bound

    arena = int((buffers.offset + buffers.size).max(initial=0))
    free = dataclasses.replace(buffers, offset=np.full(len(buffers), -1, np.int64))
    bound = min(lower_bound(free), arena)  # a wrong plan may lie below the bound: that is for `check` to say
    status = Status.OPTIMAL if bound == arena else Status.FEASIBLE
    return Plan(buffers.offset[:, None], arena, bound, status, "file", 0, 0.0, "")

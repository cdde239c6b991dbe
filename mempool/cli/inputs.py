"""Reading of the input files of the verbs: traces, buffers in a CSV, and plans with their buffers."""

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
    from traces.iterations.pattern import Pattern


@dataclass(frozen=True)
class Work:
    """The content of one input file.

    Attributes:
        kind: type of the file.
        buffers: buffers that are, or were, to be placed.
        trace: the events of ``device``, if the file is a trace.
        pattern: the pattern that most of the trace repeats or, where marks distinguish several variants, the
            variant with the largest peak load; None if no pattern was found or none was requested.
        others: the other variants, most repeated first.
        minor: a pattern that was rejected because it is no main part of the trace.
        plan: the plan of a plan file, or of a CSV that has an offset for every buffer.
        skipped: number of omitted events, by reason; None if the first bad event raises an error.
        file: all events of a trace, of all devices.
        device: the chosen device, or the only one; None where all devices count together.
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
        """Return the sorted rows of ``file`` at which iterations begin, int64[k]; empty without a pattern."""
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
    """Read a trace in any format, a plan or a MiniMalloc CSV, recognized by content.

    Args:
        path: the file.
        whole: for a trace, take all events on one timeline instead of the repeated iteration.
        main: take an iteration only if `mempool.cli.main_loop.is_main` accepts it, else the whole trace.
        alignment: alignment in bytes of a trace's buffers, where the recorder did not ask for more.
        lenient: omit impossible events, and report their number on stderr.
        device: for a trace, take the events of this device only.
        several: as for `mempool.cli.devices.device_of`.
        progress: as for `traces.read.read`.

    Raises:
        TraceError, PlanError: the content contradicts the file's format.
        OSError: the file cannot be opened.
        typer.BadParameter: the device does not exist, or a device must be named.
    """
    skipped = Counter[str]() if lenient else None
    try:
        file = _read(path, skipped, progress)
    except OSError as error:
        if error.filename is None:  # the error is from reading, not from opening
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
    """Return the events of a file, or the buffers of a file that has no events."""
    from traces.formats.registry import sniff
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
    """Write one line to stderr about omitted events, if any were omitted."""
    if skipped:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in skipped.most_common())
        events = "event" if skipped.total() == 1 else "events"
        error_line(f"{path}: {skipped.total():,} {events} left out: {reasons}")


def require_history(path: Path, work: Work) -> None:
    """Report missing parts of a trace's history on stderr, before a plan is made from the trace.

    Raises:
        Stop: the trace has no events, only the state at the end.
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
    from mempool.cli.main_loop import found_only, is_main
    from solvers import peak_load
    from traces import buffers_of

    kinds: list[Pattern] = []
    if not whole:
        kinds = _kinds(trace, max(alignment, trace.alignment))
        # Detected iterations are better evidence than optimizer steps, which may be a small part of the
        # trace.
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
    """Return the variants, most repeated first; more than one only where marks distinguish them."""
    from mempool.planning.registry import MOST_KNOWN
    from traces.iterations.pattern import find_patterns

    patterns = find_patterns(trace, anywhere=True, enveloped=(), found=found)
    patterns.sort(key=lambda one: -one.iterations * len(one.buffers))
    return [_aligned(one, alignment) for one in patterns[:MOST_KNOWN]]


def _aligned(pattern: Pattern, alignment: int) -> Pattern:
    column = np.full(len(pattern.buffers), alignment, np.int64)
    return dataclasses.replace(pattern, buffers=dataclasses.replace(pattern.buffers, alignment=column))


def _read_csv(path: Path) -> Work:
    from traces.formats.minimalloc import read_csv

    buffers = read_csv(path)
    _check_sums(path, buffers)
    if len(buffers) and (buffers.offset >= 0).all():
        return Work("csv", buffers, plan=solution(buffers))
    return Work("csv", buffers)


def _check_sums(path: Path, buffers: Buffers) -> None:
    """Check that loads and addresses fit into int64, given the sums of sizes, alignments and offsets.

    Raises:
        TraceError: the sums are too large.
    """
    from traces import TraceError

    needed = sum(buffers.size.tolist()) + sum(buffers.alignment.tolist())
    if needed + int(buffers.offset.max(initial=0)) >= 2**62:
        raise TraceError(f"{path}: sizes, alignments and offsets add up to 2**62 bytes or more")


def arenas(plan: Plan, buffers: Buffers) -> list[dict[str, int]] | None:
    """Return capacity, used bytes and number of buffers of each arena; None for a single arena."""
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
    """Return the plan that fixed offsets amount to; nothing is checked."""
    from solvers import Plan, Status, lower_bound

    arena = int((buffers.offset + buffers.size).max(initial=0))
    free = dataclasses.replace(buffers, offset=np.full(len(buffers), -1, np.int64))
    bound = min(lower_bound(free), arena)  # a wrong plan may lie below the bound; `check` reports that
    status = Status.OPTIMAL if bound == arena else Status.FEASIBLE
    return Plan(buffers.offset[:, None], arena, bound, status, "file", 0, 0.0, "")

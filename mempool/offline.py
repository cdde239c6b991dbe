"""Planning from files: the work of ``mempool plan``, ``check`` and ``info``, for Python programs.

If a trace has iterations, their variants are planned; otherwise all buffers are planned on one timeline.

For example:

    from mempool.offline import OfflinePlanner, read_input

    given = read_input("run.trace", main_only=True)
    planned = OfflinePlanner(seconds=10).plan(given)
    print(planned.plan.arena_bytes)
    planned.write("run.plan")
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import solvers
from mempool.errors import MempoolError, UsageError
from solvers import Plan, PlanError, Status, lower_bound, peak_load
from traces import EventType, TraceError, buffers_of
from traces.iterations.pattern import find_patterns
from traces.iterations.windows import iteration_marks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from solvers import Progress
    from traces import Buffers, Trace
    from traces.formats.registry import Format
    from traces.iterations.pattern import Pattern

#: Treatment of a trace of several devices if the user named no device: take all devices as one, take the
#: device with the largest peak load, or refuse the trace.
SeveralDevices = Literal["together", "largest", "refuse"]

#: Allocations up to this many bytes are ignored in the search for iterations, see
#: `traces.iterations.pattern.find_patterns`.
_SMALL_BYTES = 512


@dataclass(frozen=True)
class InputFile:
    """Content of an input file.

    Attributes:
        format: "trace" for every format with events, "plan", or the name of a format of buffers, as in
            `traces.formats.registry.FORMATS`.
        buffers: the buffers to be packed.
        trace: the events of ``device``, if the file is a trace.
        pattern: the pattern that most of the trace repeats or, if marks distinguish several variants, the
            variant with the largest peak load; None without a pattern, or if not requested.
        other_variants: the other variants, the most frequent first.
        rejected_pattern: a pattern that is too small a part of the trace.
        plan: the plan of a plan file, or of a file of buffers with an offset for every buffer.
        skipped: number of omitted events, by reason; None for a strict reader, which raises at a bad event.
        whole_trace: all events of a trace, of all devices.
        device: the chosen or only device; None if all devices count together.
        detected_marks: true if the iterations end at detected steps of an optimizer.
    """

    format: str
    buffers: Buffers
    trace: Trace | None = None
    pattern: Pattern | None = None
    other_variants: tuple[Pattern, ...] = ()
    rejected_pattern: Pattern | None = None
    plan: Plan | None = None
    skipped: Counter[str] | None = None
    whole_trace: Trace | None = None
    device: int | None = None
    detected_marks: bool = False

    @property
    def variants(self) -> list[Pattern]:
        """Return all variants of the iteration, the one with the largest peak load first."""
        return [] if self.pattern is None else [self.pattern, *self.other_variants]

    @property
    def begins(self) -> NDArray[np.int64]:
        """Return the sorted rows of ``whole_trace`` at which iterations begin, int64[k]."""
        if self.pattern is None:
            return np.empty(0, np.int64)
        begins: NDArray[np.int64] = np.sort(np.concatenate([variant.begins for variant in self.variants]))
        if self.whole_trace is None or self.device is None or self.trace is self.whole_trace:
            return begins
        rows: NDArray[np.int64] = self.whole_trace.rows_on_device(self.device)[begins]
        return rows


def read_input(
    path: str | Path,
    *,
    whole: bool = False,
    main_only: bool = False,
    alignment: int = 1,
    lenient: bool = False,
    device: int | None = None,
    several_devices: SeveralDevices = "together",
    progress: Callable[[int, int], object] | None = None,
) -> InputFile:
    """Read a trace in any format, a plan or a MiniMalloc CSV, recognized by content.

    Args:
        path: the file.
        whole: for a trace, take all events on one timeline instead of the repeated iteration.
        main_only: take an iteration only if `is_main_loop` accepts it, else the whole trace.
        alignment: least alignment of a trace's buffers, in bytes.
        lenient: omit and count impossible events.
        device: for a trace, take only the events of this device.
        several_devices: treatment of several devices if none is named.
        progress: as for `traces.read.read`.

    Raises:
        TraceError, PlanError: the content violates the file's format.
        OSError: the file cannot be opened.
        UsageError: the device does not exist, or a device must be named.
    """
    from traces.formats.registry import format_of

    path = Path(path)
    skipped = Counter[str]() if lenient else None
    try:
        file_format = format_of(path)
        if file_format.read is None or file_format.read_buffers is not None:
            if device is not None:
                raise UsageError(f"{path} is a {file_format.name}, which has no devices")
            placed = (
                _read_plan(path) if file_format.read_buffers is None else _read_buffers(path, file_format)
            )
            return dataclasses.replace(placed, skipped=skipped)
        whole_trace = file_format.read(path, skipped=skipped, progress=progress)
    except OSError as error:
        if error.filename is None:  # an error of reading, not of opening
            raise OSError(error.errno, error.strerror or str(error), str(path)) from None
        raise
    chosen = _device_of(path, whole_trace, device, several_devices)
    single = chosen is None or len(whole_trace.devices) == 1
    trace = whole_trace if single or chosen is None else whole_trace.on_device(chosen)
    given = _from_trace(path, trace, whole=whole, main_only=main_only, alignment=alignment)
    return dataclasses.replace(given, skipped=skipped, whole_trace=whole_trace, device=chosen)


def planning_caveats(path: str | Path, given: InputFile) -> list[str]:
    """Return caveats of a trace for planning: missing facts and failed requests.

    Raises:
        TraceError: the trace has no events, only the state at the end.
    """
    from mempool.analysis.caveats import caveats
    from traces.completeness import History, completeness

    if given.trace is None or given.device is None:
        return []
    sentences = caveats(given.trace, given.device)
    if completeness(given.trace, given.device).history is History.ABSENT:
        raise TraceError(f"nothing to plan: {sentences[0]}", file=path)
    return sentences


def is_main_loop(variants: Sequence[Pattern], trace: Trace) -> bool:
    """Return true if the iterations are a main part of the trace, not a detail such as a repeated layer.

    Iterations between the user's marks always are. Otherwise all iterations together must contain at least
    half of the allocations and half of the allocated bytes, and the load during iterations, including
    longer-lived buffers, must reach half of the trace's peak load.

    Args:
        variants: the variants of the iteration, at least one.
        trace: the events.

    Raises:
        TraceError: the trace contradicts itself.
    """
    marks = trace.kind == EventType.MARK
    if not _has_automatic_marks_only(trace) and (marks & (trace.category < 0)).any():
        return True
    sizes = trace.size[(trace.kind == EventType.ALLOC) & (trace.size > _SMALL_BYTES)]
    if 2 * sum(variant.iterations * len(variant.buffers) for variant in variants) < len(sizes):
        return False
    requested = sum(variant.iterations * float(variant.buffers.size.sum(dtype=float)) for variant in variants)
    if 2 * requested < sizes.sum(dtype=float):
        return False
    load = trace.load()
    begin = min(int(variant.begins[0]) for variant in variants)
    end = max(int(variant.event.max()) for variant in variants)
    return bool(2 * float(load[begin : end + 1].max()) >= float(load.max()))


def _has_automatic_marks_only(trace: Trace) -> bool:
    """Return true if iterations have a recorder's automatic marks and no marks of the user."""
    return len(iteration_marks(trace, automatic_marks=True)) > 0 and len(iteration_marks(trace)) == 0


def _device_of(path: Path, trace: Trace, device: int | None, several: SeveralDevices) -> int | None:
    """Return the device to work on; None for all events together."""
    devices = trace.devices
    named = ", ".join(map(str, devices)) or "none"
    if device is not None:
        if device not in devices:
            raise UsageError(f"{path} has no device {device}, but {named}")
        return device
    if len(devices) < 2 or several == "together":
        return devices[0] if len(devices) == 1 else None
    if several == "refuse":
        raise UsageError(f"{path} is of several devices: {named}; choose one with --device")
    trace.validate()  # the whole trace: errors name rows of the file
    return max(devices, key=lambda number: int(trace.on_device(number).load().max()))


def _from_trace(path: Path, trace: Trace, *, whole: bool, main_only: bool, alignment: int) -> InputFile:
    variants: list[Pattern] = []
    # The steps of an estimate are the optimizer's, even if the program marks iterations.
    detected_marks = "clock" in trace.metadata
    if not whole:
        alignment_of_all = max(alignment, trace.alignment)
        variants = _variants(trace, alignment_of_all)
        # Detected iterations are better evidence than optimizer steps, which may be a small part of the
        # trace.
        if _has_automatic_marks_only(trace) and not (variants and is_main_loop(variants, trace)):
            by_steps = _variants(trace, alignment_of_all, automatic_marks=True)
            if by_steps and is_main_loop(by_steps, trace):
                variants, detected_marks = by_steps, True
    for variant in variants:
        _check_sums(path, variant.buffers)
    largest = max(variants, key=lambda variant: peak_load(variant.buffers), default=None)
    if largest is None or (main_only and not is_main_loop(variants, trace)):
        linear = buffers_of(trace, alignment=alignment)
        _check_sums(path, linear)
        return InputFile("trace", linear, trace, rejected_pattern=largest)
    others = tuple(variant for variant in variants if variant is not largest)
    return InputFile("trace", largest.buffers, trace, largest, others, detected_marks=detected_marks)


def _client_of(trace: Trace) -> str:
    """Return the import name of the framework that allocated; empty if unknown."""
    framework = trace.metadata.get("framework", "")
    return trace.metadata.get("client", "torch" if framework == "pytorch" else framework)


def _variants(trace: Trace, alignment: int, *, automatic_marks: bool = False) -> list[Pattern]:
    """Return the variants, the most frequent first; more than one only if marks distinguish them."""
    from mempool.planning.registry import MOST_KNOWN

    patterns = find_patterns(trace, anywhere=True, enveloped=(), automatic_marks=automatic_marks)
    patterns.sort(key=lambda pattern: -pattern.iterations * len(pattern.buffers))
    return [
        dataclasses.replace(pattern, buffers=with_alignment(pattern.buffers, alignment))
        for pattern in patterns[:MOST_KNOWN]
    ]


def with_alignment(buffers: Buffers, alignment: int) -> Buffers:
    """Return the buffers with one alignment in bytes for all."""
    return dataclasses.replace(buffers, alignment=np.full(len(buffers), alignment, np.int64))


def _read_plan(path: Path) -> InputFile:
    plan, buffers, *_ = solvers.read_plan(path)
    return InputFile("plan", buffers, plan=plan)


def _read_buffers(path: Path, file_format: Format) -> InputFile:
    assert file_format.read_buffers is not None
    buffers = file_format.read_buffers(path)
    _check_sums(path, buffers)
    fixed = len(buffers) > 0 and bool((buffers.offset >= 0).all())
    return InputFile(file_format.name, buffers, plan=_plan_from_offsets(buffers) if fixed else None)


def _check_sums(path: Path, buffers: Buffers) -> None:
    """Check that all loads and addresses fit into int64.

    Raises:
        TraceError: the sums are too large.
    """
    needed = sum(buffers.size.tolist()) + sum(buffers.alignment.tolist())
    if needed + int(buffers.offset.max(initial=0)) >= 2**62:
        raise TraceError(f"{path}: sizes, alignments and offsets add up to 2**62 bytes or more")


def _plan_from_offsets(buffers: Buffers) -> Plan:
    """Return the plan of buffers with fixed offsets, without a check."""
    arena = int((buffers.offset + buffers.size).max(initial=0))
    free = dataclasses.replace(buffers, offset=np.full(len(buffers), -1, np.int64))
    bound = min(lower_bound(free), arena)  # a wrong plan may be below the bound, as `check` reports
    status = Status.OPTIMAL if bound == arena else Status.FEASIBLE
    return Plan(buffers.offset[:, None], arena, bound, status, "file", 0, 0.0, "")


@dataclass(frozen=True)
class PlannedInput:
    """The result of planning an input file.

    Attributes:
        given: the input with the buffers of ``plan``; of several variants, the variant with the largest
            arena.
        plan: the plan of these buffers.
        saved: plans of all variants of iterations, ``plan`` first; None without an iteration or a plan.
    """

    given: InputFile
    plan: Plan
    saved: SavedPlans | None = None

    def write(self, path: str | Path) -> None:
        """Write the plan, or the plans of all variants; a name in .csv makes a MiniMalloc CSV.

        Raises:
            OSError: the file cannot be written.
        """
        assert self.plan.offset is not None
        path = Path(path)
        if path.suffix == ".csv":
            from traces.formats.minimalloc import write_csv

            write_csv(self.given.buffers, path, offsets=self.plan.offset[:, 0])
        elif self.saved is not None:
            from mempool.planning.plan_files import write_plans

            trace, marks = self.given.trace, self.given.detected_marks
            client = "" if trace is None else _client_of(trace)
            write_plans(dataclasses.replace(self.saved, client=client, detected_marks=marks), path)
        else:
            solvers.write_plan(self.plan, self.given.buffers, path)


@dataclass(frozen=True)
class OfflinePlanner:
    """A solver with its arguments.

    Attributes:
        solver: name of the solver, a key of `solvers.SOLVERS`.
        wait_bytes: as for `solvers.packing.streams.solve_streams`.
        capacity: as for `solvers.packing.streams.solve_streams`.
        seconds: time limit for all variants together; None for no limit.
        nodes: as for `solvers.Stop`.
        target_bytes: as for `solvers.Stop`.
        solver_options: other arguments of the solver.

    Raises:
        UsageError: the solver does not exist.
    """

    solver: str = "auto"
    wait_bytes: int = 1 << 20
    capacity: int | None = None
    seconds: float | None = None
    nodes: int | None = None
    target_bytes: int | None = None
    solver_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.solver not in solvers.SOLVERS:
            raise UsageError(f"no solver {self.solver!r}; there are {', '.join(solvers.SOLVERS)}")

    def plan(
        self,
        given: InputFile,
        *,
        on_stage: Callable[[str], object] = lambda _: None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> PlannedInput:
        """Plan all variants of the iteration, or all buffers, and check the plans.

        Ctrl-C ends the search and keeps the best plan.

        Args:
            given: the input.
            on_stage: called with a description of each search before the search begins.
            on_progress: called during the searches.

        Raises:
            PlanError: the input cannot be planned.
            MempoolError: the solver made a wrong plan.
        """
        return _Planning(self, on_stage, on_progress).plan(given)


@dataclass(frozen=True)
class _Planning:
    """One call of `OfflinePlanner.plan`."""

    options: OfflinePlanner
    on_stage: Callable[[str], object]
    on_progress: Callable[[Progress], None] | None

    def plan(self, given: InputFile) -> PlannedInput:
        options = self.options
        if given.pattern is None:
            stop = solvers.Stop(
                seconds=options.seconds, nodes=options.nodes, target_bytes=options.target_bytes
            )
            return PlannedInput(given, self._solve(given.buffers, stop))
        return self._plan_variants(given, given.variants)

    def _plan_variants(self, given: InputFile, patterns: Sequence[Pattern]) -> PlannedInput:
        """Plan each variant, then all variants jointly; keep the joint plans if they pay."""
        from mempool.planning.plan_files import SavedPlans
        from mempool.planning.planned_pattern import PlannedPattern

        options = self.options
        # Only the default solver is replaced by joint planning.
        joint = len(patterns) > 1 and options.solver == "auto"
        seconds = None if options.seconds is None else options.seconds / (len(patterns) + joint)
        separate: list[PlannedPattern] = []
        interrupted = False
        for number, pattern in enumerate(patterns, 1):
            which = f"kind {number} of {len(patterns)}, " if len(patterns) > 1 else ""
            # An arena as large as the largest so far suffices for each variant.
            target = max((planned.plan.arena_bytes for planned in separate), default=options.target_bytes)
            nodes = 0 if interrupted else options.nodes
            stop = solvers.Stop(seconds=seconds, nodes=nodes, target_bytes=target)
            plan = self._solve(pattern.buffers, stop, which)
            if plan.offset is None:
                return PlannedInput(
                    dataclasses.replace(given, pattern=pattern, buffers=pattern.buffers), plan
                )
            interrupted = interrupted or plan.stopped_by == "interrupt"
            separate.append(PlannedPattern(pattern, pattern.buffers, plan))
        saved, plans = SavedPlans(separate), [planned.plan for planned in separate]
        if joint and not interrupted and (together := self._plan_jointly(separate, seconds)) is not None:
            saved = together
            plans.append(together.plans[0].plan)  # one search made the plans of all variants
        return _summary(given, saved, plans, interrupted=interrupted)

    def _plan_jointly(self, separate: Sequence[PlannedPattern], seconds: float | None) -> SavedPlans | None:
        """Plan all variants for any order, so that buffers that live on after a variant never collide."""
        from mempool.planning.variants import plan_jointly

        self.on_stage(f"planning {len(separate)} variants of iterations together; Ctrl-C keeps them apart")
        until = time.monotonic() + (math.inf if seconds is None else seconds)
        try:
            saved = plan_jointly(
                separate, wait_bytes=self.options.wait_bytes, interrupt=lambda: time.monotonic() > until
            )
        except KeyboardInterrupt:
            return None
        capacity = math.inf if self.options.capacity is None else self.options.capacity
        if saved is None or max(planned.plan.arena_bytes for planned in saved.plans) > capacity:
            return None
        if time.monotonic() <= until:
            return saved
        return dataclasses.replace(saved, plans=[_stopped_by_time(planned) for planned in saved.plans])

    def _solve(self, buffers: Buffers, stop: solvers.Stop, which: str = "") -> Plan:
        from solvers.packing.streams import solve_streams

        options = self.options
        self.on_stage(f"planning {which}{len(buffers):,} buffers; Ctrl-C keeps the best plan")
        try:
            plan = solve_streams(
                buffers,
                solver=options.solver,
                stop=stop,
                wait_bytes=options.wait_bytes,
                capacity=options.capacity,
                on_progress=self.on_progress,
                **options.solver_options,
            )
        except ValueError as error:
            raise PlanError(f"cannot be planned: {error}") from None
        if plan.offset is not None:
            try:
                solvers.check(plan, buffers)
            except PlanError as error:
                raise MempoolError(f"the solver made a wrong plan, which is not written: {error}") from None
        return plan


def _summary(
    given: InputFile, saved: SavedPlans, plans: Sequence[Plan], *, interrupted: bool
) -> PlannedInput:
    """Return the plan of the variant with the largest arena, with the search effort of all ``plans``."""
    first = max(saved.plans, key=lambda planned: planned.plan.arena_bytes)
    plan = dataclasses.replace(
        first.plan,
        lower_bound_bytes=max(first.plan.lower_bound_bytes, min(_joint_load(saved), first.plan.arena_bytes)),
        seconds=sum(plan.seconds for plan in plans),
        nodes=sum(plan.nodes for plan in plans),
        stopped_by="interrupt" if interrupted else first.plan.stopped_by,
    )
    given = dataclasses.replace(given, pattern=first.pattern, buffers=first.buffers)
    return PlannedInput(given, plan, with_first(saved, first))


def _stopped_by_time(planned: PlannedPattern) -> PlannedPattern:
    """Mark an interrupted plan as stopped by time, as the search does at a time limit."""
    if planned.plan.stopped_by != "interrupt":
        return planned
    return dataclasses.replace(planned, plan=dataclasses.replace(planned.plan, stopped_by="time"))


def _joint_load(saved: SavedPlans) -> int:
    """Return the peak load of any succession of the jointly planned variants, a lower bound."""
    from solvers.packing.variants import VariantSet

    return peak_load(VariantSet(list(saved.variants.values())).buffers) if saved.variants else 0


def with_first(saved: SavedPlans, first: PlannedPattern) -> SavedPlans:
    """Return the saved plans with the plan `first` in front, where other tools read it."""
    from mempool.planning.plan_files import SavedPlans

    order = sorted(range(len(saved.plans)), key=lambda number: saved.plans[number] is not first)
    places = {number: place for place, number in enumerate(order)}
    kinds = {places[number]: kind for number, kind in saved.variants.items()}
    return SavedPlans([saved.plans[number] for number in order], kinds)

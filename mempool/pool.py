"""Pool: records an iteration, makes a plan, replays the plan, and serves other requests by the fallback."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

from mempool import _core, sharing
from mempool.errors import OutOfMemoryError, UsageError
from mempool.per_rank_files import file_to_read, own_file, rank
from mempool.planning.planner_thread import Planner
from mempool.reporting.steps import StepCounter
from mempool.settings import EVERYTHING, NEVER, TESTED, Settings, check_swapping, made_with, settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from mempool.planning.plan_files import SavedPlans
    from mempool.planning.planned_pattern import PlannedPattern
    from mempool.planning.remembered_plans import RememberedPlans
    from mempool.recording.trace_writer import BackgroundTraceWriter
    from mempool.reporting.check_faults import Fault, FaultCollector
    from mempool.reporting.report import PoolSnapshot, Report
    from mempool.settings import Memory


class Pool:
    """Memory of one device for one client, such as NumPy.

    The pool finds the iteration, with or without marks (`iteration` or `step`), plans its buffers in the
    background, and from the next iteration on serves each buffer at the planned address. The fallback serves
    all other requests. Any thread may call any method.
    """

    #: Import name of the framework that uses the memory; empty without a framework.
    framework = ""
    #: Default of ``wait_bytes``: bytes that a plan must save for each wait of one stream for another. Not
    #: measured: a wait costs some microseconds, and concurrency of the streams.
    wait_bytes = 1 << 20
    #: Default of ``memory``: kind of GPU memory.
    memory: Memory = "plain"
    #: True if environment variables are settings of this pool.
    reads_environment = True
    #: True if the pool can hold a ``limit`` by offloading.
    swaps = False
    #: Names for users, which `dir` lists.
    public_names: tuple[str, ...] = (
        *("allocate", "close", "dynamic", "explain", "faults", "free", "iteration", "metrics", "name"),
        *("release", "report", "save", "settings", "state", "step", "trim", "wait"),
    )
    #: True if other pools can use the pool's memory.
    can_be_shared = True

    def __init__(
        self,
        device: str | _core.Device | None = None,
        *,
        name: str = "pool",
        share: Pool | None = None,
        **options: Any,
    ) -> None:
        """Make a pool and start recording.

        Args:
            device: "host", or a device of `mempool._core`; the default is the device of `share`, or "host".
            name: name for reports and logs.
            share: pool whose memory the new pool shares: both reuse memory that either frees. Plans and
                counts are separate, and either pool may be closed first.
            options: fields of `mempool.settings.Settings`; the default is the environment's value or, for
                settings of the memory itself, that of `share`.

        Raises:
            UsageError: an unknown option or device, an impossible value, or memory that cannot be shared so.
            solvers.PlanError, traces.TraceError: the plan file is no plan.
        """
        self.settings = _with_own_files(settings(environment=self.reads_environment, **options))
        self.settings = dataclasses.replace(self.settings, memory=self.settings.memory or self.memory)
        if options.get("limit") is not None and not self.swaps:
            raise UsageError(
                "limit is kept by swapping, as mempool.torch does; max_reserved is for all pools"
            )
        if self.swaps:
            check_swapping(self.settings)
        self.name = name
        price = self.settings.wait_bytes
        price = type(self).wait_bytes if price is None else price
        if share is None:
            self.device = _device("host" if device is None else device, options.get("memory"))
            self.core = self._make_core(share_streams=price < NEVER)
            self._shares_streams = price < NEVER
        else:
            price = sharing.check(share, self.settings, device, options, price)
            self.settings = sharing.settings_of(share, self.settings, price)
            self.device, self.core = share.device, share.core
            self._shares_streams = share._shares_streams
        self.client = _core.Client(self.core, name)
        # Without a plan, free memory is retained. Idle pages are released one by one after some time; if
        # releasing is slow, memory is released when the arena is taken or memory is short.
        self.client.set_retained_limit(EVERYTHING)
        self.step_counter = StepCounter(self.client)
        self._fault_collector = self._check() if self.settings.check else None
        self._server = self.client if self._fault_collector is None else self._fault_collector.core
        self._in_iteration: int | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False
        self._trace_writer: BackgroundTraceWriter | None = None
        self.loaded: SavedPlans | None = None
        self._remembered: RememberedPlans | None = None
        self.planner = Planner(
            self.client,
            self.device,
            small_bytes=self.settings.small_bytes,
            wait_bytes=price,
            explain=self._new_divergences() if self.settings.explain else None,
            framework=self.framework,
        )
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        # Finalizer of a pool that is dropped without close; it does not wait, since the planner's own thread
        # may drop the pool.
        weakref.finalize(self, self.planner.stop, 0.0).atexit = False
        _open.add(self)

    def _make_core(self, *, share_streams: bool) -> _core.Pool:
        limit = self.settings.max_reserved
        return _core.Pool(
            device=self.device,
            small_bytes=self.settings.small_bytes,
            share_streams=share_streams,
            **({} if limit is None else {"max_reserved": limit}),
        )

    def _check(self) -> FaultCollector:
        if not isinstance(self.device, _core.HostDevice):
            raise UsageError("check=True writes around every buffer: on the host only")
        from mempool.reporting.check_faults import FaultCollector

        return FaultCollector(self.client, self.name)

    @property
    def shares_streams(self) -> bool:
        """True if memory freed by one stream may serve another after an event: see `wait_bytes`."""
        return self._shares_streams

    def _begin(self) -> None:
        with _core.Bypass():
            self._load_files()
        if self.settings.mode == "replay":
            begin = self.planner.start if self.settings.background else self.planner.learner.begin
            try:
                begin(self.loaded)
            except ValueError as error:
                if self._remembered is None:
                    reason = f"{self.settings.plan}: {error}: the plan is of another device"
                    raise UsageError(reason) from None
                self.loaded = None
                self.client.drop_patterns()
                begin(None)
        elif self.settings.mode == "record" and self.settings.background:
            self.planner.start_thread()
        if self._trace_writer is not None and self.settings.background:
            self._trace_writer.start()

    def _new_divergences(self) -> Callable[[], list[str]]:
        from mempool.reporting.explain import NewDivergences

        return NewDivergences(self.client)

    def _load_files(self) -> None:
        chosen = self.settings
        if chosen.plan is not None:
            from mempool.planning.plan_files import read_plans_in_subprocess

            self.loaded = self._own_plans(read_plans_in_subprocess(chosen.plan))
        elif chosen.remember and chosen.mode == "replay" and chosen.limit is None:
            from mempool.planning.remembered_plans import remembered_plans

            self._remembered = remembered_plans(self._identity())
            if self._remembered is not None and chosen.remember != "fresh":
                self.loaded = self._remembered.read()
        if self.settings.record is not None:
            from mempool.recording.trace_writer import BackgroundTraceWriter

            whose = self.framework or self.name
            self._trace_writer = BackgroundTraceWriter(
                self.client, self.settings.record, self.device.alignment, whose
            )
            _recording.add(self)

    def _own_plans(self, plans: SavedPlans) -> SavedPlans | None:
        """Return the plans; warn and return None if they are for another framework."""
        if not self.framework or plans.client in ("", self.framework) or plans.client not in TESTED:
            return plans
        from mempool.logs import log

        log.warning("%s is a plan for %s: no plan for %s", self.settings.plan, plans.client, self.framework)
        return None

    def _identity(self) -> str:
        """Return a text that distinguishes this pool from the program's other pools."""
        device = self.device
        return f"{self.name} {type(device).__name__} {getattr(device, 'kind', '')} rank {rank()}"

    # --- iterations

    @contextlib.contextmanager
    def iteration(self) -> Iterator[None]:
        """Mark one iteration: ``with pool.iteration():`` around its code.

        Requests outside the context are no part of the plan.

        Raises:
            UsageError: inside another iteration, of this or any thread.
        """
        me, begun = threading.get_ident(), False
        try:  # end the iteration even if interrupted
            with self._lock:
                if self._in_iteration is not None:
                    whose = "this thread" if self._in_iteration == me else "another thread"
                    raise UsageError(f"iteration() inside an iteration of {whose}")
                self._in_iteration, begun = me, True
            self.planner.requested = True
            self.client.mark(_core.Mark.BEGIN)
            yield
        finally:
            if begun:
                self.client.mark(_core.Mark.END)
                self.step_counter.count()
                with self._lock:
                    self._in_iteration = None

    def step(self) -> None:
        """Mark the end of one iteration and the beginning of the next.

        Raises:
            UsageError: inside `iteration`, which marks both.
        """
        self.planner.requested = True
        self._step()

    def _step(self, *, found: bool = False) -> None:
        self._check_outside_iterations()
        self.client.mark(_core.Mark.STEP, detected=found)
        self.step_counter.count()

    def _check_outside_iterations(self) -> None:
        with self._lock:
            if self._in_iteration is not None:
                raise UsageError("step() inside iteration(): use one of them")

    @contextlib.contextmanager
    def dynamic(self) -> Iterator[None]:
        """Exclude allocations inside the context from plan and recording, such as those of a validation.

        While any thread is inside, allocations of all threads follow no plan.
        """
        self.client.enter_dynamic()
        try:
            yield
        finally:
            self.client.leave_dynamic()

    # --- memory

    def allocate(self, size: int, *, stream: int = 0) -> int:
        """Allocate ``size`` bytes for first use on ``stream``, and return their address.

        Raises:
            OutOfMemoryError: no memory, with the numbers; the pool stays usable.
            ValueError: a negative size.
        """
        if size < 0:
            raise ValueError(f"size {size} is negative")
        address: int = self._server.allocate(size, stream)
        if address == 0:
            raise OutOfMemoryError(_core.Client.last_out_of_memory())
        return address

    def free(self, address: int, *, stream: int = 0) -> None:
        """Free the buffer at ``address``.

        Raises:
            ValueError: ``address`` is not the start of a live buffer in this memory.
        """
        if not self._server.free(address, stream):
            raise ValueError(f"{address:#x} is not a live buffer of this pool")

    def trim(self) -> None:
        """Return free segments to the device.

        The arena is returned too if it has no live buffer and no iteration ran since the last call, so a loop
        that calls `trim` in every iteration keeps the arena.
        """
        self.client.give_back()

    def release(self) -> bool:
        """Return all free memory to the device, the arena included; return true if no arena remains.

        The plan remains, and the next iteration takes the arena again.
        """
        return self.client.give_back(force=True)

    # --- state and reports

    @property
    def planned(self) -> PlannedPattern | None:
        """Present or latest plan, with its pattern; None without a plan."""
        return self.planner.registry.latest or (None if self.loaded is None else self.loaded.plans[0])

    @property
    def plans(self) -> int:
        """Number of plans that this pool has made."""
        return self.planner.registry.made

    @property
    def state(self) -> str:
        """One of "closed", "off", "recording", "dynamic", "armed" (waits for a boundary), "replaying"."""
        if self._closed:
            return "closed"
        state = self.client.state()
        if state["replaying"]:
            return "replaying"
        if self.settings.mode == "off":
            return "off"
        if self.client.patterns():
            return "armed"
        return "recording" if state["recording"] or state["tracing"] else "dynamic"

    def metrics(self) -> dict[str, int | float | str]:
        """Return the pool's present numbers for a logger, under the same keys for every pool.

        Keys; missing values are 0:

        * ``state``: see `state`.
        * ``steps``: completed steps, of the optimizer or marked by the program.
        * ``periods``: repetitions that the pool detected in a program without steps.
        * ``planned_from``: step, else period, from which a plan was in effect.
        * ``plans``: number of plans made.
        * ``hits``, ``misses``: allocations at the planned address and others, since the first plan.
        * ``hit_rate``: hits / (hits + misses), from 0 to 1.
        * ``live_bytes``, ``live_peak_bytes``: bytes in use, now and at most.
        * ``reserved_bytes``, ``reserved_peak_bytes``: bytes held from the device, now and at most.
        * ``planned_bytes``: size of the plan's arena.
        * ``limit_bytes``: limit that offloading keeps.
        * ``waited_seconds``: time waited for offloading.

        A call takes some microseconds.
        """
        from mempool.reporting.metrics import make_metrics

        return make_metrics(self)

    def report(self) -> Report:
        """Return counts and sizes: print the report, show it in a notebook, or take ``.to_dict()``."""
        with _core.Bypass():
            from mempool.reporting.report import make_report

            report = make_report(self.snapshot())
        if self._fault_collector is not None:
            report.values["faults"] = [str(fault) for fault in self.faults()]
        return report

    def snapshot(self) -> PoolSnapshot:
        """Return the pool's present state, for reports."""
        from mempool.reporting.report import PoolSnapshot

        return PoolSnapshot(
            name=self.name,
            state=self.state,
            mode=self.settings.mode,
            steps=self.step_counter.steps,
            planned_from=self.step_counter.planned_from,
            # a device's arena touches no pages of the process
            page_faults=self.step_counter.page_faults if isinstance(self.device, _core.HostDevice) else None,
            rank=rank(),
            client_state=self.client.state(),
            client_stats=self.client.stats(),
            core_stats=self.memory_counters(),
            divergences=self.client.divergences(),
            decisions=self.client.decisions(),
            planned=self.planned,
            plans=self.plans,
            arena_used_bytes=sum(end - begin for begin, end in self.core.arena_ranges()),
            shared_with=sharing.other_clients(self),
            max_reserved_bytes=self.settings.max_reserved,
            offloading=self.swapping_values(),
            withdrawal_reason=self.planner.learner.withdrawal_reason,
            is_worth_planning=self.planner.is_worthwhile(),
        )

    def memory_counters(self) -> dict[str, Any]:
        """Return the counters of the memory, for reports."""
        return self.core.stats()

    def swapping_values(self) -> dict[str, Any] | None:
        """Return the report's part about offloading; None if nothing is offloaded."""
        return None

    def faults(self) -> tuple[Fault, ...]:
        """Return the faults found by ``check=True`` so far (the first 256), after checking every redzone."""
        return () if self._fault_collector is None else self._fault_collector.faults()

    def explain(self) -> str:
        """Return a text about the first divergences from the plan and their remedies."""
        with _core.Bypass():
            from mempool.reporting.explain import explain

            return explain(self.snapshot())

    def save(self, path: str | Path) -> None:
        """Write the plans in use; ``Pool(plan=path)`` later replays them from the first iteration.

        Each process of a distributed training writes, and later reads, a separate file: see
        `mempool.per_rank_files`.

        Raises:
            UsageError: there is no plan yet.
        """
        with _core.Bypass():
            from mempool.planning.plan_files import write_plans_in_subprocess

            saved = self._saved_plans() or self.loaded
            if saved is None:
                raise UsageError("there is no plan yet: no iteration has been seen to repeat")
            write_plans_in_subprocess(saved, own_file(os.fspath(path)), made_with=made_with(self.framework))

    @property
    def has_detected_marks(self) -> bool:
        """True if the pool itself marks the program's iterations."""
        return False

    def _plans_to_remember(self) -> SavedPlans | None:
        """Return the plans to keep for the next run; None if useless or kept already.

        Plans that replaced loaded plans are not kept: they avoid buffers that were alive in this run's arena,
        and would grow from run to run.
        """
        remembered = self._remembered
        if remembered is None or not self.plans or not self.planner.registry.are_followed():
            return None
        if self.settings.remember == "long" and not remembered.is_long_ago():
            return None
        saved = self._saved_plans()
        known = set() if self.loaded is None else {planned.key for planned in self.loaded.plans}
        return saved if saved is not None and {planned.key for planned in saved.plans} - known else None

    def _saved_plans(self) -> SavedPlans | None:
        if (saved := self.planner.saved_plans()) is None:
            return None
        whose = self.framework or self.name
        return dataclasses.replace(saved, client=whose, detected_marks=self.has_detected_marks)

    # --- planning and the end

    def plan_now(self) -> bool:
        """Search the recording in the calling thread; return true if a plan was installed."""
        with _core.Bypass():
            return self.planner.look()

    def reset_plans(self) -> None:
        """Drop all plans and record again, at the planner's next turn.

        Useful when the meaning of an iteration changes, as when a program begins to mark iterations.
        """
        self.planner.reset_plans()

    def require_step_marks(self) -> None:
        """Announce calls of `step` or `iteration`: make no plan before the first mark.

        Repetitions before the first mark, such as the layers of a first training step, are parts of an
        iteration. After 65,536 allocations without a mark, plans are made without marks.
        """
        self.planner.learner.require_step_marks()

    def wait(self, seconds: float = 10.0) -> bool:
        """Wait at most ``seconds`` until there is a plan; return true if there is one."""
        return self.planner.wait(seconds)

    def close(self) -> None:
        """Stop planning and finish the trace file. Buffers stay valid, and requests are still served."""
        if self._closed:
            return
        ours = self._pid == os.getpid()
        explained = self.explain() if self.settings.explain and ours else ""
        self._closed = True
        self.leave_open_at_exit()
        if not ours:
            return  # a forked child lacks the planner and the file
        self.planner.stop()
        self.client.set_recording(False)
        with _core.Bypass():
            saved = self._plans_to_remember()
        if len(self.core.clients()) > 1:  # other clients need no memory retained for this client's plans
            self.client.drop_patterns()
            self.client.set_retained_limit(0)
        if self._fault_collector is not None:
            self._fault_collector.end()
            self._fault_collector.log()
        if self._trace_writer is not None:
            with _core.Bypass():
                self._trace_writer.close()
        if self._remembered is not None and saved is not None:
            with _core.Bypass():
                self._remembered.write(saved, made_with=made_with(self.framework))
        if explained:
            from mempool.logs import log

            log.warning("%s", explained)

    def close_at_exit(self) -> None:
        """Close the pool when Python exits; subclasses may skip preparations for later use of buffers."""
        self.close()

    def renew_locks(self) -> None:
        """Replace locks, and another thread's iteration, in a forked child, which lacks their threads."""
        self._lock = threading.Lock()
        if self._in_iteration != threading.get_ident():
            self._in_iteration = None

    def leave_open_at_exit(self) -> None:
        """Leave the pool open at the exit of Python; the caller closes it later."""
        _open.discard(self)
        _recording.discard(self)

    def __dir__(self) -> list[str]:
        return list(self.public_names)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<mempool.Pool {self.name!r}: {self.state}>"

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def _with_own_files(given: Settings) -> Settings:
    """Return the settings with file names of this rank."""
    return dataclasses.replace(
        given,
        plan=None if given.plan is None else file_to_read(given.plan),
        record=None if given.record is None else own_file(given.record),
    )


def _device(device: str | _core.Device, memory: str | None) -> _core.Device:
    if memory not in (None, "plain", getattr(device, "kind", "plain")):
        raise UsageError(f"memory={memory!r} is of CUDA devices only, not of {device!r}")
    if isinstance(device, _core.Device):
        return device
    if device == "host":
        return _core.HostDevice()
    raise UsageError(f"no device {device!r}; there is 'host'")


#: Pools to close when Python exits.
_open: weakref.WeakSet[Pool] = weakref.WeakSet()
#: Open pools that have to finish a trace file; kept alive until then.
_recording: set[Pool] = set()


@atexit.register
def _close_open() -> None:
    # after an error, the other pools still write their traces
    with contextlib.ExitStack() as each:
        for pool in list(_open):
            each.callback(pool.close_at_exit)

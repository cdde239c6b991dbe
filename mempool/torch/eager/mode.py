"""A dispatch mode that offloads storages to the host and reloads them, to hold a device memory limit."""

from __future__ import annotations

import importlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mempool.logs import log
from mempool.recording.torch.ledger import storages_in
from mempool.torch.eager import interposer
from mempool.torch.eager.arena_admission import ArenaAdmission
from mempool.torch.eager.bypass import Bypass
from mempool.torch.eager.dispatcher_patches import DispatcherPatches
from mempool.torch.eager.eviction_policy import EvictionPolicy
from mempool.torch.eager.forks import forking
from mempool.torch.eager.graph_captures import GraphCaptures
from mempool.torch.eager.iterations import Iterations
from mempool.torch.eager.op_footprints import OpFootprints, PoolCounters
from mempool.torch.eager.operation_runner import OperationRunner
from mempool.torch.eager.operator_traits import TraitsRegistry, wraps_memory
from mempool.torch.eager.pool_headroom import PoolHeadroom
from mempool.torch.eager.recorded_iteration import IterationDetector
from mempool.torch.eager.schedule_follower import ScheduleFollower
from mempool.torch.eager.storages import RELOADING, StorageRecord, StorageRegistry
from mempool.torch.eager.transfers import OffloadCounters, TransferManager, report_values
from mempool.torch.optimizer_steps import Listener

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core
    from mempool.torch.eager.operator_traits import OperatorTraits
    from mempool.torch.eager.relative_limit import RelativeLimit
    from mempool.torch.offload.engine import Engine

#: An unreachable limit in bytes, in effect until a relative limit is decided.
UNDECIDED = 1 << 62
_DETACH = torch.ops.aten.detach.default
_NO_KWARGS: dict[str, Any] = {}
_FAKE = torch._C._TorchDispatchModeKey.FAKE


class OffloadMode(TorchDispatchMode):
    """Dispatch mode that keeps the memory of one device's storages within a limit.

    Before each operation, the mode reloads all storages among the arguments, independent of any schedule, so
    no result depends on a schedule. The mode frees device memory only before an operation, since C++ code may
    use an operation's results until the next operation begins. An iteration that matches the recorded one
    follows a schedule, which moves storages ahead of time; in other iterations, the storages with the
    farthest next use are evicted when room is needed.

    Attributes:
        limit_bytes: limit of the storages' device memory, bytes.
        counts: counters of transfers, evictions and waits.
        marked: whether the program marks the ends of iterations; otherwise the first optimizer's steps do.
        storages: registry of the known storages.
        iterations: the recurring iterations of the program, and their schedules.
        transfers: offloads and reloads storages.
        eviction: evicts storages when no schedule makes room.
        headroom: headroom of the pool; None without a pool.
        traits: traits of the operations.
        operations: runs the operations that the mode sees.
        follower: follows schedules without the mode; None: the mode sees every operation.
        bypass: lets operations skip the mode while nothing has to move; None: the mode sees every operation.
        relative_limit: decides the limit when the first iteration ends; None: the limit is decided.
        patches: patches that reload storages for PyTorch code that accesses memory past the dispatcher.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        limit_bytes: int,
        *,
        alignment: int = 64,
        host_bytes: int | None = None,
        client: _core.Client | None = None,
        on_iteration_end: Callable[[], None] = lambda: None,
        reset_plans: Callable[..., None] = lambda **_: None,
    ) -> None:
        """Create the mode; the mode is active inside its ``with`` block.

        Args:
            engine: copies between device and host.
            device: device whose storages are offloaded.
            limit_bytes: most bytes of device memory for the storages.
            alignment: sizes are rounded up to a multiple of this, bytes.
            host_bytes: most bytes of host memory that schedules use; None: no limit.
            client: client of the pool that serves the device. With a pool, workspaces of running operations
                are measured and count, and memory that the pool serves to unknown storages is subtracted from
                the limit.
            on_iteration_end: called when an optimizer's step ends an iteration.
            reset_plans: see `Planner.reset_plans`.
        """
        super().__init__()
        self.engine = engine
        self.counts = OffloadCounters()
        self.limit_bytes = limit_bytes
        self.storages = StorageRegistry(
            device, alignment, None if client is None else client.pool.owns, engine.current_stream
        )
        self._client = client
        self._on_iteration_end = on_iteration_end
        self.transfers = TransferManager(engine, self.storages, self.counts)
        self.headroom = None if client is None else PoolHeadroom(client, self.storages, limit_bytes)
        self.iterations = Iterations(
            engine, self.storages, self.transfers, self.counts, limit_bytes, host_bytes, client, self.headroom
        )
        self.eviction = EvictionPolicy(
            self.storages, self.transfers, self.counts, limit_bytes, self.iterations.next_use, self.headroom
        )
        self.traits = TraitsRegistry(device.type)
        self._traits = self.traits.by_id
        counters = None if client is None else PoolCounters(client)
        footprints = OpFootprints(counters, alignment, lambda: self.eviction.spare_bytes)
        self.operations = OperationRunner(
            engine,
            self.storages,
            self.transfers,
            self.iterations,
            self.eviction,
            self.counts,
            footprints,
            self.headroom,
        )
        self._admission: ArenaAdmission | None = None
        self.bypass: Bypass | None = None
        if client is not None and self.headroom is not None:  # both are None, or neither
            self._admission = ArenaAdmission(
                client,
                self.headroom,
                self.storages,
                self.iterations,
                self.eviction,
                self.transfers,
                reset_plans,
            )
            self.bypass = Bypass(
                self,
                client,
                self.headroom,
                self.storages,
                self.iterations,
                self.transfers,
                self._admission,
                self.counts,
            )
            self.iterations.follower = ScheduleFollower(
                self, client, self.headroom, self.iterations, self._admission
            )
        self.follower = self.iterations.follower
        self.operations.admission, self.operations.bypass = self._admission, self.bypass
        self.operations.follower = self.follower
        self._optimizer: Any = None
        self._listener: Listener | None = None
        self._ended = False
        self._detector: IterationDetector | None = IterationDetector()
        self.marked = False
        self._has_warned_of_thread = False
        self.relative_limit: RelativeLimit | None = None
        self.patches = DispatcherPatches(
            self.storages,
            self.transfers,
            self.operations.record_of,
            self.operations.known_record,
            self.operations.make_room_for,
        )
        self._set_operation_kind = interposer.library().mempool_interposer_set_kind
        self._keeping_operations: dict[str, bool] = {}  # see `_keeps_arguments`, by operation
        self._captures = (
            GraphCaptures(self.begin_capture, self.end_capture, engine.note_stream)
            if engine.streams
            else None
        )

    # --- iterations

    def __enter__(self) -> Self:
        # Otherwise PyTorch imports it at the first operation, where Ctrl-C would break the import.
        importlib.import_module("torch._dynamo")

        interposer.install(self)
        self._ended = False
        self._listener = Listener(before=self._before_optimizer_step, after=self._after_optimizer_step)
        self.transfers.thread = threading.get_ident()
        interposer.begin_entries(self)
        self.patches.install()
        forking.add(self)
        if self._captures is not None:
            self._captures.install()
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        if self.bypass is not None:
            self.bypass.resume()
        super().__exit__(*args)
        self.end()

    def end(self) -> None:
        """Reload every storage, and stop handling operations."""
        self._ended = True
        if self.follower is not None:
            self.follower.stop()
        if self.bypass is not None:
            self.bypass.end()
        if self._listener is not None:
            self._listener.remove()
        if self.relative_limit is not None:
            self.relative_limit.end()
        if self.headroom is not None:
            self.headroom.end()  # reloads from now on do not count against the limit
        self.transfers.reload_all()
        self.iterations.close()
        forking.discard(self)
        self.patches.remove()
        interposer.remove(self)
        if self._captures is not None:
            self._captures.remove()

    def stop(self) -> None:
        """Stop all evictions; offloaded storages are reloaded on demand."""
        if self.bypass is not None:
            self.bypass.abandon()
            self.bypass.is_available = False
        if self.follower is not None:
            self.follower.stop()
        self.limit_bytes = self.eviction.limit_bytes = self.iterations.limit_bytes = UNDECIDED
        if self.headroom is not None:
            self.headroom.end()
        self.iterations.forget()

    def begin_capture(self) -> None:
        """Begin the capture of a graph: until `end_capture`, evict nothing and bypass no operation.

        Storages that other threads use always stay on the device.
        """
        if threading.get_ident() == self.transfers.thread:
            self.operations.close_bypass()
            self.iterations.suspend()
            self.operations.is_partial = True
            interposer.begin_entries(self)  # the mode must see a storage before its entries
        with self.transfers.lock:
            self.transfers.wait_all()
            self.engine.begin_capture()
            self.transfers.captures += 1

    def end_capture(self) -> None:
        """End the capture of a graph."""
        with self.transfers.lock:
            self.transfers.captures -= 1
            self.engine.end_capture()

    def _before_optimizer_step(self, _: torch.optim.Optimizer) -> None:
        """Stop the period detection at an optimizer's first step, which marks iterations instead."""
        if threading.get_ident() == self.transfers.thread:
            self._stop_detection()

    def _after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if threading.get_ident() != self.transfers.thread:
            self._warn_of_thread()
        if self.marked or threading.get_ident() != self.transfers.thread:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is optimizer:
            self.step()
            self._on_iteration_end()

    def _warn_of_thread(self) -> None:
        if not self._has_warned_of_thread:
            log.warning(
                "an optimizer steps in %s, not in the thread that set the limit: what is trained there is "
                "not swapped; install the pool in the thread that trains",
                threading.current_thread().name,
            )
        self._has_warned_of_thread = True

    def begin(self) -> None:
        """Begin an iteration; operations between two iterations belong to neither."""
        self.marked = True
        self._stop_detection()
        self.operations.remove_dead()
        if self.follower is not None:
            self.follower.take_over()
        self.operations.is_partial = False
        begins = len(self.iterations.current) > 0
        self.iterations.begin()
        if begins and self._admission is not None:
            self._admission.begin_iteration()
        interposer.begin_entries(self)
        if self.follower is not None:
            self.follower.begin_iteration()

    def step(self) -> None:
        """End an iteration; the next iteration may begin."""
        self._stop_detection()
        self._end_iteration()

    def decide_limit(self, limit_bytes: int) -> None:
        """Replace the undecided limit between two iterations."""
        self.relative_limit = None
        self.limit_bytes = self.eviction.limit_bytes = limit_bytes
        self.iterations.set_limit(limit_bytes)
        if self.headroom is not None:
            self.operations.admit(0, [])
            self.headroom.request(limit_bytes)

    def _end_iteration(self) -> None:
        operations = self.operations
        if self.bypass is not None and self._detector is None:  # otherwise the mode is inside an operation
            self.bypass.end_iteration()
        operations.remove_dead()
        if self.bypass is not None and self.bypass.is_standing_by:
            self.patches.end_iteration()
            self.counts.end_iteration()
            self.engine.end_iteration()
            return
        operations.record_entries()
        interposer.begin_entries(self)
        if self.relative_limit is not None:
            self.relative_limit.end_iteration()
        self.patches.end_iteration()
        operations.forget_dead_unwritten()
        peak_bytes = operations.take_peak()
        if self.follower is not None:
            peak_bytes = self.follower.end_iteration(peak_bytes)
        if self.bypass is not None and self.bypass.is_open:
            self.counts.end_iteration()
            self.engine.end_iteration()
            self.iterations.suspend()
        else:
            self._end_seen_iteration(peak_bytes)
        for seconds in self.engine.take_waits():
            self.counts.add_wait(seconds)
        if self.headroom is not None:
            self.headroom.warn_of_excess()

    def _end_seen_iteration(self, peak_bytes: int) -> None:
        """End an iteration whose operations were seen or followed, with a peak of `peak_bytes`."""
        if (
            self.headroom is None or not self.headroom.defers_registration
        ):  # else storages are not registered yet
            self.iterations.limit_bytes = self.limit_bytes - self._foreign_bytes()
        partial, self.operations.is_partial = self.operations.is_partial, False
        has_followed = not partial and self.iterations.has_followed_schedule and self.iterations.is_final
        followed = self.iterations.pattern if has_followed else None
        if partial:
            self.counts.end_iteration()
            self.iterations.resume()
        else:
            self.iterations.end()
        self.eviction.limit_bytes = self.iterations.resident_limit_bytes
        if self._admission is not None:
            self._admission.update(followed)
        if self.bypass is not None and not partial:
            self.bypass.record_peak(peak_bytes)
        if self.follower is not None and self._detector is None:
            self.follower.begin_iteration()

    def _foreign_bytes(self) -> int:
        """Return the bytes of the pool that belong to no known storage, such as those of libraries."""
        if self._client is None or self.headroom is None:
            return 0
        if not self.headroom.holds_arena:
            return self.headroom.foreign_bytes
        served = int(self._client.stats()["live"]["current"])
        return max(served - (self.storages.resident_bytes - self.storages.foreign_bytes), 0)

    def values(self) -> dict[str, Any]:
        """Return the report entries as a dict for JSON, with sizes in bytes."""
        beyond = {} if self.headroom is None else self.headroom.values()
        values = report_values(self.counts, self.iterations.schedule)
        if self.bypass is not None:
            values["bypassed"] += self.bypass.skipped_operations
        if self.follower is not None:
            values["followed"] = self.follower.followed_operations
        limit_bytes = None if self.limit_bytes == UNDECIDED else self.limit_bytes
        return {"limit_bytes": limit_bytes, **values, **beyond}

    # --- operations that this mode does not see

    def reload(self, absent: list[torch.Tensor]) -> None:
        """Make the bytes of these tensors accessible for an operation of a loop over single entries.

        On a CPU, the operation uses the host copy in place, unless a reload is under way.
        """
        records = [record for one in absent if (record := self.storages.find(one.untyped_storage()))]
        if self.storages.device != "cpu":
            self.operations.admit(0, records)
            return
        for record in records:
            if record.state == RELOADING:
                self.transfers.wait(record)

    def lend(
        self,
        tensor: torch.Tensor,
        operation: str,
        writes: bool,  # noqa: FBT001
        given: list[tuple[Any, StorageRecord, bool, bool]],
    ) -> None:
        """Reload and pin the storages of an argument, and add an entry per storage to `given`."""
        self.counts.other_threads += 1
        other = threading.get_ident() != self.transfers.thread
        for plain, storage in storages_in(tensor):
            if (record := self.operations.known_record(plain, storage)) is None:
                continue
            self.operations.make_room_for(record)
            given.append((self, record, False, writes))
            given[-1] = self, record, self.transfers.lend(record), writes
            if (other and self.storages.device != "cpu") or self._keeps_arguments(operation):
                self.transfers.hold_resident(record)  # another thread may use another stream

    def _keeps_arguments(self, operation: str) -> bool:
        """Return whether an operation uses arguments after its end; a name is like ``aten::add.Tensor``."""
        if (keeps := self._keeping_operations.get(operation)) is None:
            space, _, name = operation.partition("::")
            name, _, overload = name.partition(".")
            function = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
            effects = self.traits.of(function).effects
            keeps = self._keeping_operations[operation] = effects is not None and effects.retains_tensors
        return keeps

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH and self.transfers.makes_native_moves and type(args[0]) is torch.Tensor:
            return args[0].data  # autograd takes a saved result, which needs no access to memory
        kwargs = kwargs or _NO_KWARGS
        if self._ended:  # another thread ended the offloading
            return func(*args, **kwargs)
        if self._is_foreign_thread():
            return func(*args, **kwargs)
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return func(*args, **kwargs)  # no memory; sizes may be symbolic
        self._set_operation_kind(1)
        try:
            return self._dispatch(func, types, args, kwargs)
        finally:
            self._set_operation_kind(0)

    def _is_foreign_thread(self) -> bool:
        """Return whether this is a thread of autograd's engine, which inherits the program's modes.

        A GPU's backward pass runs in such a thread while the program's thread waits.
        """
        return threading.get_ident() != self.transfers.thread and (
            self.storages.device == "cpu" or torch._C._current_graph_task_id() == -1
        )

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if types and (is_wrapper := self.traits.skips(types)) is not None:
            if is_wrapper:
                return NotImplemented
            if wraps_memory(args, kwargs):  # the tracing mode runs operations on them, unseen here
                self.transfers.reload_all()
            return func(*args, **kwargs)
        traits = self._traits.get(id(func)) or self.traits.of(func)
        if traits.asks:
            if traits.may_pass:
                interposer.learn_view(func)
            return traits.repeat(*args, **kwargs)
        if self.bypass is not None and self.bypass.is_open:
            return self.operations.run_bypassed(self.bypass, traits, args, kwargs)
        if traits.makes_views(args):
            if not self.transfers.makes_native_moves:  # else the schedule's recording has the access
                self._see_view(traits, args)
            return traits.repeat(*args, **kwargs)
        result = self.operations.run(traits, args, kwargs)
        if self._detector is not None:
            self._detect_iteration(self._detector)
        return result

    def _see_view(self, traits: OperatorTraits, args: Any) -> None:
        """Reload the base of a view, and let later calls of the function skip the mode."""
        self.operations.view(args)
        if traits.may_pass:
            interposer.learn_view(traits.function)

    def _detect_iteration(self, detector: IterationDetector) -> None:
        """Detect the ends of iterations in a program that marks none."""
        if detector.ends(self.iterations.current):
            before = self.counts.diverged
            self._end_iteration()
            detector.record_end(diverged=self.counts.diverged > before)
        elif detector.begins(self.iterations.current):
            self.iterations.begin()
            interposer.begin_entries(self)

    def _stop_detection(self) -> None:
        """Stop the period detection, and forget the detected iterations: marks or optimizer steps follow."""
        if self._detector is not None:
            self._detector = None
            self.iterations.forget()
            self.eviction.limit_bytes = self.limit_bytes

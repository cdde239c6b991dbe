"""
Native core of the pool: devices, arena and guard, fallback, state machine, entry points of the adapters.
"""

from collections.abc import Sequence
import enum
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


def begin_flight(path: str, records: int = 1048576) -> None:
    """
    Record the calls of pools and driver in a file; an empty path ends the recording.
    """

class Device:
    """Owner of memory and streams."""

    @property
    def alignment(self) -> int:
        """Alignment in bytes."""

    @property
    def page(self) -> int:
        """
        Bytes committed and returned at a time; 0: a reservation is memory, all or nothing.
        """

    @property
    def slow_return(self) -> bool:
        """True if releasing memory waits for all queued work."""

    @property
    def large(self) -> int:
        """Size in bytes from which a request gets a separate segment."""

    def memory(self) -> tuple[int, int]:
        """
        Return (free, total) bytes of the whole device, for all users; zeros: unknown.
        """

class HostDevice(Device):
    """Host memory by mmap."""

    def __init__(self) -> None: ...

class SimulatedCounts:
    """Counts of the calls to a simulated device."""

    @property
    def committed(self) -> int: ...

    @property
    def peak_committed(self) -> int: ...

    @property
    def reserves(self) -> int: ...

    @property
    def releases(self) -> int: ...

    @property
    def resizes(self) -> int: ...

    @property
    def refusals(self) -> int: ...

    @property
    def live_reservations(self) -> int: ...

    @property
    def events_alive(self) -> int: ...

    @property
    def synchronizes(self) -> int: ...

    @property
    def errors(self) -> int: ...

class SimulatedDevice(Device):
    """Addresses without memory, of a given capacity."""

    def __init__(self, *, capacity: int = 1099511627776, page: int = 0, alignment: int = 512, shared_segment: int = 2097152, large: int = 1048576) -> None: ...

    def counts(self) -> SimulatedCounts: ...

    def finish(self, stream: int) -> None:
        """Complete all work queued on the stream."""

    def capture(self, streams: Sequence[int]) -> None:
        """
        Capture these streams into a graph; calls that would break the capture count as errors. None: end the capture.
        """

    def set_capacity(self, capacity: int) -> None: ...

    def fail_after(self, calls: int) -> None:
        """Refuse every request for memory after this many more."""

def cuda_devices(driver: str = 'libcuda.so.1') -> list[str]:
    """
    Return the names of the CUDA devices; empty without a driver or a device. Makes no context.
    """

class CudaDevice(Device):
    """
    A CUDA device's memory of one kind: plain, growing, managed, pinned or hosted.
    """

    def __init__(self, index: int | None = None, *, driver: str = 'libcuda.so.1', memory: str = 'plain', else_plain: bool = False) -> None:
        """
        Make a device. Without an index: the device that bind() names. The driver starts with the first call that needs it; refused calls are counted. ``else_plain``: use plain memory if the device has no growing memory; bind() then decides.

        Raises:
            RuntimeError: there is no driver, or one too old for this memory.
            ValueError: a negative index, or no such kind of memory.
        """

    @property
    def kind(self) -> str: ...

    def check(self) -> None:
        """
        Start the driver without making a context.

        Raises:
            RuntimeError: there is no such device, or it has no such memory.
        """

    def context_of(self, stream: int) -> int:
        """
        Return another context that the calling thread means by this stream, for pinned memory; 0: the device's own.
        """

    def wait_elsewhere(self, context: int, stream: int) -> bool:
        """
        Wait for a stream of another context. False: refused, or a graph is captured there.
        """

    @property
    def index(self) -> int | None:
        """Index of the device; None: not bound yet."""

    def bind(self, index: int) -> bool:
        """
        Bind the device to this index unless bound; return true if the device has this index.
        """

    @property
    def errors(self) -> int:
        """Number of calls that the driver refused, except for lack of memory."""

    @property
    def last_error(self) -> str | None:
        """The latest of these."""

    @property
    def refusals(self) -> int:
        """
        Number of the calling thread's memory requests that the driver refused for another reason than lack of memory.
        """

    @property
    def last_refusal(self) -> str:
        """The latest of these."""

class Pattern:
    """
    One recurring iteration: expected sizes in order, and their planned offsets.
    """

    def __init__(self, *, cyclic: bool = True, marked: bool = False, unroll: int = 1, arena_bytes: int, low_water: int = 0) -> None:
        """
        low_water: low-water mark, the position in the first table before which the fewest bytes are live; the arena is best taken there.
        """

    def add_table(self, *, sequence: int, stream: int, sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], phase: int = 0, marks: Sequence[int] = [], least: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        Add the positions of one sequence: sizes int64[n] in bytes, offsets int64[n, unroll] in bytes (-1: dynamic). phase: the sequence's allocation count when position 0 was due. The end of the first table is the end of the iteration. least: for an envelope, int64[n], lower bounds of the sizes in bytes.
        """

    def leads_through(self, sequence: int, sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> bool:
        """
        Return true if a marked iteration of the sequence, with sizes int64[n] in bytes, follows the pattern without a miss.
        """

    @property
    def arena_bytes(self) -> int: ...

class StreamEvent:
    """A moment of a CUDA stream: all work queued there before."""

    def query(self) -> bool:
        """
        Return whether the moment has passed.

        Raises:
            RuntimeError: work on the device failed.
        """

    def order_before(self, stream: int) -> None:
        """
        Let later work of a stream, given by handle, wait for the moment.

        Raises:
            RuntimeError: the driver refused.
        """

class CudaCopies:
    """
    Copies between a GPU and page-locked host memory on CUDA streams, given by handle.
    """

    def __init__(self, driver: str = 'libcuda.so.1') -> None:
        """
        Open the driver, and work in the context that is this thread's current one.

        Raises:
            RuntimeError: there is none.
        """

    def record(self, stream: int) -> StreamEvent:
        """
        Return the present moment of a stream.

        Raises:
            RuntimeError: the driver refused.
        """

    def copy(self, stream: int, target: int, source: int, size: int, after: Sequence[int], events: Sequence[StreamEvent]) -> StreamEvent:
        """
        Copy `size` bytes from address `source` to address `target` on a stream, after the work so far of the streams `after` and after `events`. Return the moment after the copy.

        Raises:
            RuntimeError: the driver refused.
        """

    @property
    def address(self) -> int:
        """Address of the object, for the functions of `cuda_copy_functions`."""

def cuda_copy_functions() -> int:
    """
    Return the address of the table of C functions for copies (see cuda_copies.hpp).
    """

class Signal:
    """Event that is set once; Ctrl-C leaves no wait half-done."""

    def __init__(self) -> None:
        """An event that is not set."""

    def set(self) -> None:
        """Set the event."""

    def is_set(self) -> bool:
        """Return whether the event is set."""

    def wait(self, seconds: float = 1000000000.0) -> bool:
        """
        Wait until the event is set, at most so many seconds; return whether it is set. Ctrl-C is raised afterwards.
        """

class TakenRange:
    """A range taken from a free list; released with the object."""

    @property
    def at(self) -> int:
        """Offset, bytes."""

class FreeList:
    """
    Free list of an arena of host memory, in whole pages; offsets and sizes in bytes.
    """

    def __init__(self, size: int) -> None:
        """An empty list of `size` bytes, a multiple of a page."""

    @property
    def size(self) -> int:
        """Bytes of the arena."""

    @property
    def used(self) -> int:
        """Bytes taken, in whole pages."""

    def allocate(self, size: int) -> int | None:
        """
        Take `size` bytes, 1 or more, of the best fit and return their offset; None if no free range is large enough.
        """

    def allocate_last(self, size: int) -> int | None:
        """
        Take the end of the last large enough free range, away from other places: see `allocate`.
        """

    def allocate_at(self, at: int, size: int) -> bool:
        """
        Take `size` bytes, 1 or more, from page `at` on; return False if some of them are taken.
        """

    def take(self, size: int, at: int = -1) -> TakenRange:
        """
        Take `size` bytes until the returned object ends: from page `at` on if free, else as far back as possible; for -1 at the best fit. None if no free range is large enough.
        """

    def release(self, at: int, size: int) -> None:
        """Free bytes taken before, and merge them with adjacent free ranges."""

    def take_peak(self) -> int:
        """Return the high-water mark since the last call, in bytes."""

    def free_ranges(self) -> list[tuple[int, int]]:
        """Return the free ranges as (begin, end), by place."""

class Pool:
    """One device's memory: arena, guard, fallback."""

    def __init__(self, *, device: object, small_bytes: int = 512, max_reserved: int = 18446744073709551615, recorded_events: int = 65536, share_streams: bool = True) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def wait_for_device(self) -> bool:
        """
        Wait for all queued work. False: the wait failed, for example during a graph capture.
        """

    def clients(self) -> list[str]:
        """Return the names of the clients that share the pool."""

    def begin_graph(self, id: tuple[int, int], streams: Sequence[int]) -> None:
        """Assign allocations on these streams to a graph that is being captured."""

    def end_graph(self, id: tuple[int, int]) -> None: ...

    def release_graph(self, id: tuple[int, int]) -> None:
        """
        End one use of a graph's memory, which is released when its buffers are freed. Call once for each begin.
        """

    def trim(self) -> None:
        """Give free memory back to the device."""

    def return_idle(self) -> None:
        """Release memory that stayed idle through the last two calls."""

    def release_arena(self) -> bool:
        """
        Release the arena if no range is live; return true if no arena is left.
        """

    def set_retained_limit(self, bytes: int) -> None:
        """Release free memory beyond this many bytes at once."""

    def set_max_reserved(self, bytes: int) -> None: ...

    def set_budget(self, bytes: int) -> None:
        """
        Set a soft limit: free memory is released before more is taken, and memory taken beyond the limit is counted.
        """

    def room(self) -> int:
        """
        Return the bytes available at once: within the budget after free memory was released, or in the largest hole of the arena; negative: bytes held beyond the budget.
        """

    def owns(self, address: int) -> bool: ...

    def arena_ranges(self) -> list[tuple[int, int]]:
        """Return the live (begin, end) offsets in the arena, in order."""

class Mark(enum.Enum):
    """Marks of the beginning and the end of an iteration."""

    STEP = 0

    BEGIN = 1

    END = 2

MOST_PATTERNS: int = 16

ARENA_TRANSITIONS: list = ...

class RecordingSchedule:
    """State machine of a client's recording."""

    def __init__(self) -> None: ...

    @property
    def state(self) -> str: ...

    def apply(self, event: str, allocations: int, misses: int, *, replaying: bool = False) -> bool:
        """
        Tell of an event, with the client's counters; return true if the state changed.
        """

    def is_due(self, allocations: int, misses: int, *, replaying: bool = False, miss_score: int = 0) -> bool:
        """Return true if the pause is over."""

    @staticmethod
    def transitions() -> list[tuple[str, str, str]]:
        """Return (state, event, next state) for each state and event."""

CHANGED_SCORE: int = 12

MIN_PAUSE: int = 64

MAX_PAUSE: int = 4194304

JUDGED_ITERATIONS: int = 4

KEPT_ITERATIONS: int = 64

LEARNING_ITERATIONS: int = 16

LEAST_HIT_RATE: float = 0.6

class Client:
    """
    One adapter's view of a pool: sequences, recording, patterns, statistics.
    """

    def __init__(self, pool: Pool, name: str) -> None: ...

    @property
    def handle(self) -> int:
        """
        Address of the client for the plain C entry points mempool_alloc and mempool_free.
        """

    def allocate(self, bytes: int, stream: int = 0, zeroed: bool = False) -> int:
        """Return an address; 0: out of memory."""

    @property
    def pool(self) -> Pool: ...

    def use(self, address: int, stream: int) -> bool:
        """
        Record a use of a live buffer by another stream; once freed, the memory waits until that stream has completed. False: no live buffer of this pool, or the stream owns the buffer.
        """

    def free(self, address: int, stream: int = 0) -> bool:
        """Free a buffer. False: no live buffer of this pool."""

    def reallocate(self, address: int, bytes: int, stream: int = 0) -> tuple[int, bool]:
        """Return (new address or 0, true if the old address is not the pool's)."""

    def mark(self, mark: Mark, *, detected: bool = False) -> None:
        """detected: the pool found the step, not the program."""

    def record_detected_step(self) -> None:
        """Record a detected step in the trace only; no iteration begins or ends."""

    def enter_dynamic(self) -> None: ...

    def leave_dynamic(self) -> None: ...

    def set_recording(self, on: bool) -> None: ...

    def advance_recording(self, event: str) -> None:
        """
        Tell the recording's state machine of an event, by its name in `RecordingSchedule.transitions`.
        """

    def resume_recording(self) -> bool:
        """Record again if the pause is over; return true if so."""

    def set_tracing(self, on: bool, *, folder: str = '', piece: int = 262144) -> None:
        """
        Record all events for a trace. Events beyond `piece` events in memory go to a file in `folder`, if given.
        """

    def recording(self, allocations: int = 18446744073709551615) -> tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)], list[int], list[int], bool]:
        """
        Return the planner's ring, or its last `allocations` allocations and the events between: (packed records for `TraceNames`; streams by sequence; total allocations by sequence; true if no event was lost or left out).
        """

    def find_recurrence(self) -> tuple[int, int] | None:
        """
        Search the planner's ring for a recurring iteration: (earliest relevant allocation, 0 with marks; number of allocations). None: nothing recurs; the next signal comes after a quarter more events.
        """

    def take_trace(self) -> bytes:
        """
        Return the oldest packed records of the trace not yet taken; empty: none are left.
        """

    def install(self, pattern: Pattern, iterations_seen: int = 0, instead: bool = False) -> int:
        """
        Install a pattern that was recorded here and return its id; it takes effect at the next boundary. `instead`: only as a replacement of a known pattern with the same sizes; 0: none is known.
        """

    def load(self, warmup: Pattern | None, steady: Pattern, *, unsure: bool = False) -> int:
        """
        Replay a pattern from a file, from the next allocation on; return the id of ``steady``. ``unsure``: the arena is allocated once the program has followed the pattern for some allocations.
        """

    def drop_patterns(self) -> None: ...

    def results(self) -> tuple[list[tuple[int, int, float]], list[tuple[int, int, float]]]:
        """
        Return the (hits, misses, seconds or 0) of the last 8 iterations without a plan in effect, and of as many since the latest plan took effect; the latest first.
        """

    def device_is_bound(self) -> None:
        """Begin the loaded patterns of all clients of the pool."""

    def give_back(self, force: bool = False) -> bool:
        """
        Give free memory back, and the arena if no range is live and no iteration ran since the last call, or by force. True: no arena is left.
        """

    def request_arena(self) -> bool:
        """
        Allocate the arena that patterns need now rather than at the next boundary. False: the arena is smaller.
        """

    def watch_departures(self, hook: int, most_reserved: int = 0, most_misses: int = 0) -> None:
        """
        Call the C function at the address `hook` after each request with which the pool holds more than `most_reserved` bytes, or the client has had more than `most_misses` misses; 0 ends this.
        """

    def set_arena_allowed(self, takes: bool) -> None:
        """
        Allow arena allocation at boundaries under a budget too, and not only by `request_arena`.
        """

    def planned_offset_of(self, address: int) -> int | None:
        """
        Return the offset of a live buffer in the followed plan, also while no arena exists; None: no offset.
        """

    def allocate_next_at(self, place: int) -> None:
        """
        Give the next request inside a dynamic scope this offset in the arena, if that range is free.
        """

    def wait_for_work(self, seconds: float, search_seconds: float = 0.0, allocations: int = 18446744073709551615, replan_at_iteration: int = 0, other_layouts: int = 18446744073709551615) -> tuple[bool, float]:
        """
        Wait for planning work; return (there may be work, processor seconds of searches in vain). Searches in vain end no wait until they took `search_seconds`. The wait also ends after `seconds`, at `allocations`, when recording is due again, at a refused arena, with a pinned range that keeps blocking a plan from iteration `replan_at_iteration` on, and, if `other_layouts` is given, when that number of the state changes.
        """

    def grow_recording(self) -> bool:
        """
        Double the capacity of the ring. False: the ring is not full, or would exceed a sixteenth of the memory held.
        """

    def retire_unused_patterns(self) -> None:
        """
        Mark patterns that were unused for long as dormant, so that no arena is kept for them. Call once a second; waiting for work does so too.
        """

    def wake(self) -> None: ...

    def ignore_time(self) -> None:
        """
        Do not judge plans by the time of this thread's present iteration, in which the planner has worked.
        """

    def check_again_after(self, events: int) -> None: ...

    def patterns(self) -> list[tuple[int, int]]:
        """
        Return the (id, iterations begun) of each known pattern, warm-ups included, the latest first.
        """

    def state(self) -> dict[str, Any]: ...

    def stats(self) -> dict[str, Any]: ...

    def misses(self) -> int:
        """Return the number of requests so far that missed the plan."""

    def unplanned_bytes(self, bytes: int) -> int:
        """
        Return the part of this thread's next requests, of `bytes` together, for which the plan has no places, as far as known.
        """

    def reset_peaks(self) -> None: ...

    def take_live_peak(self) -> int:
        """Return the largest number of live bytes since the last call."""

    def set_retained_limit(self, bytes: int) -> None:
        """
        Set the bytes of free memory that the pool should keep for this client; the largest wish of all clients counts.
        """

    def pinned_ranges(self) -> list[tuple[int, int]]:
        """
        Return the (begin, end) arena offsets of pinned ranges while one of them blocks a plan in iteration after iteration; else none.
        """

    def other_plans_ranges(self) -> list[tuple[int, int]]:
        """
        Return the (begin, end) arena offsets of other clients' plans, dormant ones excepted; disjoint and in order.
        """

    def divergences(self) -> list[dict[str, Any]]: ...

    def decisions(self) -> list[dict[str, Any]]:
        """Return the latest decisions about plans and arena, the oldest first."""

    def note_decision(self, decision: str, *, count: int = 0, times: int = 0, bytes: int = 0) -> None:
        """Add a decision of the planner."""

    @staticmethod
    def last_out_of_memory() -> dict[str, int]: ...

class Bypass:
    """
    While entered, this thread's allocations bypass the adapters: the pool must not record itself.
    """

    def __init__(self) -> None: ...

    def __enter__(self) -> Bypass: ...

    def __exit__(self, *args: object) -> None: ...

class TraceNames:
    """Ids of buffers in a trace, across the pieces of a recording."""

    def __init__(self) -> None: ...

    def rows(self, packed: bytes | NDArray[numpy.uint8]) -> dict[str, NDArray[Any]]:
        """Return the columns of a trace from events of `Client.take_trace`."""

    def brief_rows(self, packed: bytes | NDArray[numpy.uint8], streams: Sequence[int]) -> dict[str, NDArray[Any]]:
        """
        Return the columns of a trace from events of `Client.recording`, without times and addresses.
        """

EVENT_FIELDS: tuple = ...

def snapshot(pool: Pool, client: Client | None = None) -> tuple[bytes, bytes, bytes]:
    """
    Return the state of the pool and the history of a client at one moment: packed records of SEGMENT_FIELDS, BLOCK_FIELDS and EVENT_FIELDS.
    """

def live_objects() -> dict:
    """
    Return the number of existing objects of each class in the process; an uninstalled pattern counts as a plan.
    """

def usage(pool: Pool) -> dict[str, Any]:
    """
    Return segments and bytes held, in size-class pages (small) and otherwise (large); idle bytes in segments with live buffers; the peak of reserved bytes since Client.reset_peaks(); counts of device calls.
    """

def set_history(client: Client, events: int) -> None:
    """
    Keep the last `events` allocations, frees and device calls; 0: none. An unchanged number continues the history.
    """

SEGMENT_FIELDS: tuple = ...

BLOCK_FIELDS: tuple = ...

SEGMENT_KINDS: tuple = ('arena', 'shared', 'large', 'small')

BLOCK_STATES: tuple = ('free', 'live', 'waiting')

EVENT_KINDS: tuple = ...

class Checked:
    """
    A client with redzones around every buffer and poison in freed buffers; host only.
    """

    def __init__(self, client: Client) -> None: ...

    def allocate(self, bytes: int, stream: int = 0, zeroed: bool = False) -> int:
        """Return an address; 0: out of memory."""

    def free(self, address: int, stream: int = 0) -> bool:
        """
        Free a buffer. False: the address is no live buffer, which may be a fault.
        """

    def verify(self) -> None:
        """Check every redzone and all poison now."""

    def flush(self) -> None:
        """Return all freed buffers to the client."""

    def faults(self) -> list:
        """
        Return (kind, address, bytes, offset, allocated at, freed at, noticed at) of the first few hundred faults.
        """

    def faults_found(self) -> int:
        """Return the total number of faults."""

def set_fault_listener(listener: object) -> None:
    """
    Set a function that the main thread calls without arguments soon after a fault.
    """

def set_fault_libraries(folders: Sequence[str]) -> None:
    """Set folders whose code is skipped when a fault names its caller."""

class Hook:
    """Allocator of a framework, served by one client at a time."""

    def serve(self, client: Client, checked: Checked | None = None, instead: bool = False) -> None:
        """
        Let the client serve all threads from now on, through `checked` if given. `instead`: replace another client.
        """

    def stop(self) -> None:
        """
        Return to the framework's own allocator. Buffers of the former client return to that client when freed.
        """

    def serving(self) -> bool: ...

    def held(self) -> int:
        """Number of clients that serve or have live buffers."""

def numpy_hook() -> Hook:
    """
    Return the hook of NumPy's arrays; NumPy's default handler calls the pool's functions from now on.
    """

def torch_cpu_hook() -> Hook:
    """
    Return the hook of PyTorch's CPU tensors, called through the companion.
    """

def torch_cpu_functions() -> tuple:
    """
    Return the addresses of the companion's functions: alloc, owns, free, out_of_memory (see c_api.h).
    """

def torch_room_function() -> int:
    """Return the address of the bypass's function: room (see c_api.h)."""

def torch_misses_function() -> int:
    """
    Return the address of the function that counts a client's misses (see c_api.h).
    """

def torch_unplanned_function() -> int:
    """
    Return the address of the function that looks at a client's next requests (see c_api.h).
    """

def torch_guest_hook() -> Hook:
    """Return the hook of the guest in front of PyTorch's own CUDA allocator."""

def torch_guest_functions() -> int:
    """
    Return the address of the table of the guest's functions (see torch_guest.hpp).
    """

def torch_guest_stop() -> None:
    """
    Let PyTorch's own allocator serve everything from now on; planned tensors stay valid.
    """

def torch_cuda_hook(driver: str = 'libcuda.so.1') -> Hook:
    """
    Return the hook of PyTorch's CUDA tensors. The first driver named also serves requests that no client serves.
    """

def torch_cuda_functions() -> dict[str, int]:
    """
    Return the addresses of the functions for PyTorch, by the names of PyTorch's setters, and "alloc" and "free".
    """

def torch_cuda_refuse_by(function: int) -> None:
    """
    Set the address of the function that throws when memory runs out; 0: a RuntimeError is thrown.
    """

def torch_cuda_plain(device: int) -> Client:
    """
    Return the client of requests that no pool serves on this device; None: no such request occurred.
    """

def cupy_allocator(memory: Any, pointer: Any, client: Any, shortage: Any, device: Any, stream: Any) -> Any:
    """
    Return an allocator for cupy.cuda.set_allocator; see cupy_allocator.hpp for the parts.
    """

def cupy_knows(object: Any) -> bool:
    """Return true for a capsule of a C function that the allocator can call."""

def cupy_hold_devices() -> None:
    """
    Let no call wait for a whole CUDA device from now on, which would break captures of its streams.
    """

def cupy_release_devices() -> None:
    """End one hold."""

def cupy_capture(pool: Pool, stream: int) -> int:
    """Return the driver's number of the stream's capture; 0: none."""

def cupy_goes_on(pool: Pool, graph: int, stream: int) -> bool:
    """Return true if the capture that began there continues."""

def cupy_begin_capture(pool: Pool, graph: int) -> None:
    """
    Keep memory requested on the capture's streams for the graph, until the capture ends.
    """

def cupy_end_capture(pool: Pool, graph: int) -> None: ...

def cupy_release_capture(pool: Pool, graph: int) -> None:
    """Release the memory of a destroyed graph."""

class ReplayDevice(Device):
    """Addresses without memory, with a log of the memory held over time."""

    def __init__(self, capacity: int, *, growing: bool = False) -> None:
        """
        Make a device with a GPU's plain memory, or (`growing`) with pages of 2 MiB.
        """

    @property
    def calls(self) -> int: ...

    def held(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]]:
        """
        Return columns address, size, region, start, end of segments or pages: region is the number of the reservation, from 1; start and end are event numbers; end -1: still held.
        """

class Replay:
    """Replay of a trace's events through a client."""

    def __init__(self, client: Client, device: ReplayDevice, *, kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], birth: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], mark: Annotated[NDArray[numpy.int8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        `birth` is the row of the alloc of each event's buffer, `mark` a Mark or -1.
        """

    def go(self, most: int) -> bool:
        """
        Replay until there may be planning work, for at most this many events; return true if events are left.
        """

    def course(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], int]:
        """
        Return the address of each alloc, bytes live and reserved after each event, and the first refused alloc or -1.
        """

class DeviceCalls:
    """Calls that a pool makes to a device, one at a time."""

    def __init__(self, device: Device) -> None: ...

    def reserve(self, bytes: int, alignment: int = 512) -> int: ...

    def commit(self, address: int, bytes: int) -> bool: ...

    def decommit(self, address: int, bytes: int) -> None: ...

    def resize(self, address: int, from_bytes: int, to_bytes: int) -> int: ...

    def release(self, address: int, bytes: int) -> None: ...

    def copy(self, to: int, source: int, bytes: int, stream: int = 0) -> None: ...

    def zero(self, address: int, bytes: int, stream: int = 0) -> None: ...

    def record(self, stream: int) -> int: ...

    def query(self, event: int) -> bool: ...

    def wait(self, stream: int, event: int) -> bool: ...

    def forget(self, event: int) -> None: ...

    def synchronize(self) -> bool: ...

    def capturing(self, stream: int) -> bool: ...

    def capture(self, stream: int) -> int: ...

def thread_stream() -> int:
    """Return the calling thread's number of the per-thread default stream."""

class Occupancy:
    """The overlap guard alone."""

    def __init__(self) -> None: ...

    def set_planned_slots(self, starts: Sequence[int]) -> None: ...

    def is_free(self, begin: int, end: int) -> bool: ...

    def take(self, begin: int, end: int) -> None: ...

    def release(self, begin: int) -> int:
        """
        End the live range that starts at `begin`; return its end, or 0 if there is none.
        """

    def find_hole(self, bytes: int, alignment: int, limit: int) -> int: ...

    def end_of_last(self) -> int: ...

    def live_ranges(self) -> list[tuple[int, int]]: ...

"""
Native core of the pool: devices, arena and guard, fallback, state machine, adapters' entry points.
"""

from collections.abc import Sequence
import enum
from typing import Annotated, Any

import numpy
from numpy.typing import NDArray


class Device:
    """What memory and streams belong to."""

    @property
    def alignment(self) -> int:
        """Bytes."""

    @property
    def page(self) -> int:
        """
        Bytes committed and returned at a time; 0: a reservation is memory, all or nothing.
        """

    @property
    def slow_return(self) -> bool:
        """Giving memory back waits for all queued work."""

    @property
    def large(self) -> int:
        """Requests of at least this many bytes get a segment of their own."""

    def memory(self) -> tuple[int, int]:
        """
        (free, total) bytes of the whole device, whoever uses it; zeros where it cannot be known.
        """

class HostDevice(Device):
    """Host memory by mmap."""

    def __init__(self) -> None: ...

class SimulatedCounts:
    """What a simulated device has been asked for."""

    @property
    def committed(self) -> int: ...

    @property
    def peak_committed(self) -> int: ...

    @property
    def reserves(self) -> int: ...

    @property
    def commits(self) -> int: ...

    @property
    def decommits(self) -> int: ...

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
        """All work queued on the stream is done."""

    def capture(self, streams: Sequence[int]) -> None:
        """
        A graph is captured on these streams, and what would spoil it counts as an error; none: no longer.
        """

    def set_capacity(self, capacity: int) -> None: ...

    def fail_after(self, calls: int) -> None:
        """Refuse every request for memory after this many more."""

def cuda_devices(driver: str = 'libcuda.so.1') -> list[str]:
    """
    Names of the CUDA devices; empty where there is no driver or no device. Makes no context.
    """

class CudaDevice(Device):
    """A CUDA device's memory of one kind: plain, growing, managed or pinned."""

    def __init__(self, index: int | None = None, *, driver: str = 'libcuda.so.1', memory: str = 'plain') -> None:
        """
        Without an index: the device that bind() names. The driver starts with the first call that needs it; what it refuses is counted.

        Raises:
            RuntimeError: there is no driver, or one too old for this memory.
            ValueError: a negative index, or no such kind of memory.
        """

    @property
    def kind(self) -> str: ...

    def check(self) -> None:
        """
        Starts the driver, and makes no context.

        Raises:
            RuntimeError: there is no such device, or it has no such memory.
        """

    def read_mostly(self, address: int, bytes: int, on: bool = True) -> bool:
        """
        Managed memory that is rarely written may be in several places at once. False: refused.
        """

    def context_of(self, stream: int) -> int:
        """
        Of pinned memory: another context that the calling thread means by this stream; 0: it is of this device's.
        """

    def wait_elsewhere(self, context: int, stream: int) -> bool:
        """
        Waits for a stream of another context. False: refused, or a graph is captured there.
        """

    @property
    def index(self) -> int | None:
        """None: not bound yet."""

    def bind(self, index: int) -> bool:
        """
        Whether the device is now the one of this index; the first call that names a device decides.
        """

    @property
    def errors(self) -> int:
        """How many calls the driver refused, except for lack of memory."""

    @property
    def last_error(self) -> str | None:
        """The latest of these."""

    @property
    def refusals(self) -> int:
        """
        How many requests for memory of the calling thread the driver refused for another reason than lack of it.
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
        low_water: the position of the first table before which least is alive, so that the arena is best taken there.
        """

    def add_table(self, *, sequence: int, stream: int, sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offsets: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu', writable=False)], phase: int = 0, marks: Sequence[int] = [], least: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> None:
        """
        Positions of one sequence: sizes int64[n] in bytes, offsets int64[n, unroll] in bytes (-1: dynamic). phase: the count of the sequence's allocations at which position 0 was due. The first table added decides where iterations end. least: of an envelope, int64[n], bytes that each position has at least.
        """

    @property
    def arena_bytes(self) -> int: ...

class Pool:
    """One device's memory: arena, guard, fallback."""

    def __init__(self, *, device: object, small_bytes: int = 512, max_reserved: int = 18446744073709551615, recorded_events: int = 65536, share_streams: bool = True) -> None: ...

    def stats(self) -> dict[str, Any]: ...

    def wait_for_device(self) -> bool:
        """
        All that was queued anywhere is done. False: it could not be waited for, as while a graph is captured.
        """

    def clients(self) -> list[str]:
        """Names of those that share it."""

    def begin_graph(self, id: tuple[int, int], streams: Sequence[int]) -> None:
        """
        What is allocated on these streams belongs to a graph that is being captured.
        """

    def end_graph(self, id: tuple[int, int]) -> None: ...

    def release_graph(self, id: tuple[int, int]) -> None:
        """
        Once for each begin: the graph is gone, and its memory goes back when its buffers are freed.
        """

    def trim(self) -> None:
        """Give free memory back to the device."""

    def release_arena(self) -> bool:
        """
        Give the arena back if nothing in it is alive; True if there is none afterwards.
        """

    def set_retained_limit(self, bytes: int) -> None:
        """Free memory beyond this goes back to the device at once."""

    def set_max_reserved(self, bytes: int) -> None: ...

    def set_budget(self, bytes: int) -> None:
        """
        Before more than this is taken from the device, free memory goes back; what is taken beyond it all the same is counted.
        """

    def room(self) -> int:
        """
        Bytes that can be had at once within the budget when free memory has gone back, or else in the largest hole of the arena; negative: so many are held beyond it.
        """

    def owns(self, address: int) -> bool: ...

    def arena_ranges(self) -> list[tuple[int, int]]:
        """Live (begin, end) offsets in the arena, in order."""

class Mark(enum.Enum):
    """Where an iteration begins and ends."""

    STEP = 0

    BEGIN = 1

    END = 2

class Client:
    """
    One adapter's view of a pool: sequences, recording, patterns, statistics.
    """

    def __init__(self, pool: Pool, name: str) -> None: ...

    @property
    def handle(self) -> int:
        """
        What the plain C entry points mempool_alloc and mempool_free take as their client.
        """

    def allocate(self, bytes: int, stream: int = 0, zeroed: bool = False) -> int:
        """An address; 0: out of memory."""

    @property
    def pool(self) -> Pool: ...

    def use(self, address: int, stream: int) -> bool:
        """
        A live buffer is used by this stream too: once freed, its memory waits until that stream is through with it. False: not a live buffer of this pool, or its own stream.
        """

    def free(self, address: int, stream: int = 0) -> bool:
        """False: not a live buffer of this pool."""

    def reallocate(self, address: int, bytes: int, stream: int = 0) -> tuple[int, bool]:
        """(new address or 0, whether the old one is not ours)."""

    def mark(self, mark: Mark, *, detected: bool = False) -> None:
        """found: the program did not set it."""

    def record_detected_step(self) -> None:
        """A step that only the tape shows: nothing begins or ends by it."""

    def enter_dynamic(self) -> None: ...

    def leave_dynamic(self) -> None: ...

    def set_recording(self, on: bool) -> None: ...

    def set_tracing(self, on: bool, *, folder: str = '', piece: int = 262144) -> None:
        """
        Record everything. Events beyond a piece in memory go to a file in the folder, if there is one.
        """

    def recording(self, allocations: int = 18446744073709551615) -> tuple[Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)], list[int], list[int], bool]:
        """
        The planner's ring, or its last so many allocations and what came between: (packed records, for `TraceNames`; streams by sequence; allocations ever by sequence; nothing was lost or left out).
        """

    def find_recurrence(self) -> tuple[int, int] | None:
        """
        What recurs in the planner's ring: (the earliest of its allocations that says anything, 0 where there are marks; how many there are). None: nothing, and the bell rings again when a quarter more has come.
        """

    def take_trace(self) -> bytes:
        """
        The oldest records of the tape that nobody has taken, packed; empty: there are none.
        """

    def install(self, pattern: Pattern, iterations_seen: int = 0, instead: bool = False) -> bool:
        """
        Takes up a pattern that was recorded here; it takes effect at the next boundary. `instead`: only in place of one of the same sizes; False: there is none any more.
        """

    def load(self, warmup: Pattern | None, steady: Pattern) -> None:
        """Replays a pattern from elsewhere, from the next allocation on."""

    def drop_patterns(self) -> None: ...

    def device_is_bound(self) -> None:
        """Loaded patterns, of all clients of the pool, may begin."""

    def give_back(self, force: bool = False) -> bool:
        """
        Free memory goes back; the arena too if nothing in it is alive and no iteration ran since the last call, or by force. True: no arena is left.
        """

    def request_arena(self) -> bool:
        """
        The arena that patterns need, now rather than at the next boundary. False: it is not so large.
        """

    def set_arena_allowed(self, takes: bool) -> None:
        """
        Whether within a budget the arena comes at boundaries, as where there is none, or only by `request_arena`.
        """

    def planned_offset_of(self, address: int) -> int | None:
        """
        Offset in the arena that the plan followed now has for a live buffer, or would have if there were an arena; None: none.
        """

    def allocate_next_at(self, place: int) -> None:
        """
        The next request inside of a dynamic scope gets this offset in the arena, if it is free there.
        """

    def wait_for_work(self, seconds: float, search_seconds: float = 0.0, allocations: int = 18446744073709551615, misses: int = 18446744073709551615, miss_score: int = 18446744073709551615, replan_at_iteration: int = 0, other_layouts: int = 18446744073709551615) -> tuple[bool, float]:
        """
        (there may be something to plan; seconds of processor time that looks in vain took). Waits at most so many seconds; looks in vain end no wait as long as they took less than `looks`. Also ends when something stays in the way of a plan, not before iteration `around`, when the arena was refused, at so many allocations, while nothing is recorded at so many misses and when so much of the program goes off its plan, and, where it is given, when `other_layouts` of the state is another number.
        """

    def grow_recording(self) -> bool:
        """
        Room for twice as many events. False: it is not full, or would be more than a sixteenth of the memory held.
        """

    def retire_unused_patterns(self) -> None:
        """
        Once a second, as waiting for work does: for what nobody has followed for long no arena is kept.
        """

    def wake(self) -> None: ...

    def check_again_after(self, events: int) -> None: ...

    def patterns(self) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def stats(self) -> dict[str, Any]: ...

    def reset_peaks(self) -> None: ...

    def set_retained_limit(self, bytes: int) -> None:
        """
        Free memory that this client would have the pool keep; of all clients' wishes the largest counts.
        """

    def pinned_ranges(self) -> list[tuple[int, int]]:
        """
        Where something is in the way of a plan iteration after iteration: its range of the arena, (begin, end) offsets, and all that were in the way before and are still there.
        """

    def other_plans_ranges(self) -> list[tuple[int, int]]:
        """
        (begin, end) offsets in the arena where other clients' plans lie, but those that rest; disjoint, in order.
        """

    def divergences(self) -> list[dict[str, Any]]: ...

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
    """
    Gives buffers the ids that a trace knows them by, across the pieces of a recording.
    """

    def __init__(self) -> None: ...

    def rows(self, packed: bytes | NDArray[numpy.uint8]) -> dict[str, NDArray[Any]]:
        """Columns of a trace, from events as `Client.take_trace` gives them."""

    def brief_rows(self, packed: bytes | NDArray[numpy.uint8], streams: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The same from those of `Client.recording`, all at time 0."""

EVENT_FIELDS: tuple = ...

def snapshot(pool: Pool, client: Client | None = None) -> tuple[bytes, bytes, bytes]:
    """
    What the pool holds and, of a client, the history, all of one moment: packed records of SEGMENT_FIELDS, BLOCK_FIELDS and EVENT_FIELDS.
    """

def live_objects() -> dict:
    """
    How many of each there are in the process; a pattern that nobody has installed yet is a plan too.
    """

def usage(pool: Pool) -> dict[str, Any]:
    """
    Segments and bytes held, in size-class pages (small) and otherwise (large); of these idle, in segments in which something lives; what was reserved at most since Client.reset_peaks(); dealings with the device.
    """

def set_history(client: Client, events: int) -> None:
    """
    Keep the last so many allocations, frees and dealings with the device; 0: none. The same number again goes on.
    """

SEGMENT_FIELDS: tuple = ...

BLOCK_FIELDS: tuple = ...

SEGMENT_KINDS: tuple = ('arena', 'shared', 'large', 'small')

BLOCK_STATES: tuple = ('free', 'live', 'waiting')

EVENT_KINDS: tuple = ...

class Checked:
    """
    A client with redzones around every buffer and poison in the freed ones; host only.
    """

    def __init__(self, client: Client) -> None: ...

    def allocate(self, bytes: int, stream: int = 0, zeroed: bool = False) -> int:
        """An address; 0: out of memory."""

    def free(self, address: int, stream: int = 0) -> bool:
        """False: not a live buffer, which may be a fault."""

    def verify(self) -> None:
        """Look at every redzone and all poison now."""

    def flush(self) -> None:
        """Give all freed buffers back to the client."""

    def faults(self) -> list:
        """
        (kind, address, bytes, offset, allocated at, freed at, noticed at), the first few hundred.
        """

    def faults_found(self) -> int:
        """How many, ever."""

def set_fault_listener(listener: object) -> None:
    """
    Called without arguments by the main thread soon after a fault was found.
    """

def set_fault_libraries(folders: Sequence[str]) -> None:
    """Faults name whoever called the code in these folders."""

class Hook:
    """A framework's allocator, which one client at a time serves."""

    def serve(self, client: Client, checked: Checked | None = None, instead: bool = False) -> None:
        """
        This client serves all threads from now on, through `checked` if that is given; `instead` of another one.
        """

    def stop(self) -> None:
        """
        The framework allocates as without us; buffers of the client that served go back to it when they are freed.
        """

    def serving(self) -> bool: ...

    def held(self) -> int:
        """How many clients serve or have buffers alive."""

def numpy_hook() -> Hook:
    """
    Who serves NumPy's arrays, whose default handler has our functions from now on.
    """

def torch_cpu_hook() -> Hook:
    """Who serves PyTorch's tensors on the CPU, through the companion."""

def torch_cpu_functions() -> tuple:
    """
    Addresses of what the companion calls: alloc, owns, free, out_of_memory (see c_api.h).
    """

def torch_room_function() -> int:
    """Address of what the bypass asks: room (see c_api.h)."""

def torch_cuda_hook(driver: str = 'libcuda.so.1') -> Hook:
    """
    Who serves PyTorch's tensors on CUDA devices. The first driver named is the one of what nobody serves.
    """

def torch_cuda_functions() -> dict[str, int]:
    """
    Addresses of what PyTorch calls, by the names of its setters, and "alloc" and "free".
    """

def torch_cuda_refuse_by(function: int) -> None:
    """
    The address of what throws when memory runs out; 0: nothing, and it is a RuntimeError.
    """

def torch_cuda_plain(device: int) -> Client:
    """
    Who serves what no pool of ours does on this device; None: nobody has had to.
    """

def cupy_allocator(memory: Any, pointer: Any, client: Any, shortage: Any, device: Any, stream: Any) -> Any:
    """
    What cupy.cuda.set_allocator takes; see cupy_allocator.hpp for the parts.
    """

def cupy_knows(object: Any) -> bool:
    """Whether it is a capsule of a C function that the allocator can call."""

def cupy_hold_devices() -> None:
    """
    Nobody waits for a whole CUDA device from now on, which would break captures of its streams.
    """

def cupy_release_devices() -> None:
    """Once for each hold."""

def cupy_capture(pool: Pool, stream: int) -> int:
    """
    The driver's number of the capture that the stream is part of; 0: none.
    """

def cupy_goes_on(pool: Pool, graph: int, stream: int) -> bool:
    """Whether the capture that began there does."""

def cupy_begin_capture(pool: Pool, graph: int) -> None:
    """
    Until the end of this capture, what is asked for on its streams is kept for its graph.
    """

def cupy_end_capture(pool: Pool, graph: int) -> None: ...

def cupy_release_capture(pool: Pool, graph: int) -> None:
    """Its graph is gone."""

class ReplayDevice(Device):
    """Addresses without memory, and what of them was held when."""

    def __init__(self, capacity: int, *, growing: bool = False) -> None:
        """With a GPU's plain memory, or with pages of 2 MiB."""

    @property
    def calls(self) -> int: ...

    def held(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]]:
        """
        Columns address, size, region, start, end, of segments or pages: where reservations are numbered from 1, and indices of events; the end is -1 of what is still held.
        """

class Replay:
    """The events of a trace, put through a client."""

    def __init__(self, client: Client, device: ReplayDevice, *, kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], birth: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], mark: Annotated[NDArray[numpy.int8], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
        """
        `birth` is the row of the alloc of each event's buffer, `mark` a Mark or -1.
        """

    def go(self, most: int) -> bool:
        """
        Goes on until there may be something to plan, for at most so many events; whether any is left.
        """

    def course(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)], int]:
        """
        Address of each alloc, bytes live and reserved after each event, the first alloc not served or -1.
        """

class DeviceCalls:
    """What a pool asks of a device, one call at a time."""

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
    """The calling thread's own number of the per-thread default stream."""

class Occupancy:
    """The guard alone."""

    def __init__(self) -> None: ...

    def set_planned_slots(self, starts: Sequence[int]) -> None: ...

    def is_free(self, begin: int, end: int) -> bool: ...

    def take(self, begin: int, end: int) -> None: ...

    def release(self, begin: int) -> int:
        """The end of what lived there; 0 if nothing did."""

    def find_hole(self, bytes: int, alignment: int, limit: int) -> int: ...

    def end_of_last(self) -> int: ...

    def live_ranges(self) -> list[tuple[int, int]]: ...

"""
Native part of solvers: packing kernels, simulated allocators, swap planner.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


class SimulatedDevice:
    """Device with addresses and a limit in bytes, without memory."""

    def __init__(self, limit: int, floor: int = 0) -> None:
        """Create a device whose own addresses begin above the floor."""

    def answer(self, size: int, address: int) -> None:
        """Give the next unanswered reservation of this size this address."""

    @property
    def limit(self) -> int: ...

    @property
    def calls(self) -> int: ...

    @property
    def segments(self, /) -> tuple[numpy.typing.NDArray[numpy.int64], ...]:
        """
        Columns address, size, stream, region, start, end; the end of a segment still held is -1.
        """

LARGEST_DEVICE: int = 72057594037927936

class SimulatedAllocator:
    """
    Allocator that serves the requests of one trace from the memory of a device.
    """

    def run(self, kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], birth: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], adopted: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], address: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], int]:
        """
        Return the address of each alloc, bytes live and reserved after each event, and the first failed alloc or -1. `birth` is the row of the alloc of each event's buffer. The first len(adopted) events describe the first state: `adopted` has the handles of its live buffers, -1 for the others. With the column `address`, recorded releases of memory are repeated.
        """

class SimulatedFit(SimulatedAllocator):
    """First or best fit in one region that grows."""

    def __init__(self, device: SimulatedDevice, *, best: bool, alignment: int, growth: int) -> None: ...

class PyTorchRules:
    """Settings of PyTorch's caching allocator, in bytes."""

    def __init__(self, *, max_split: int, max_non_split_rounding: int, large_segment: int, gc_threshold: float, divisions: Sequence[int]) -> None: ...

    def rounded(self, size: int) -> int:
        """Bytes of a block for a request."""

    def segment_for(self, size: int) -> int:
        """Bytes of a segment for a rounded request."""

class SimulatedPyTorch(SimulatedAllocator):
    """PyTorch's caching allocator."""

    def __init__(self, device: SimulatedDevice, rules: PyTorchRules) -> None: ...

    def adopt(self, address: int, size: int, stream: int, used: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], bytes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], slack: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
        """
        Add a segment of the first state and its used blocks by address; return the blocks' handles. `slack` is the number of bytes by which a block may reach into the free range behind.
        """

    def learned(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
        """
        Return handles of adopted blocks and the ends that the recorded addresses require; later entries win.
        """

class SimulatedPyTorchExpandable(SimulatedAllocator):
    """PyTorch's caching allocator with expandable segments."""

    def __init__(self, device: SimulatedDevice, rules: PyTorchRules) -> None: ...

class SimulatedCupy(SimulatedAllocator):
    """CuPy's pool."""

    def __init__(self, device: SimulatedDevice) -> None: ...

class SimulatedRmmPool(SimulatedAllocator):
    """RMM's pool; the maximum -1 means none."""

    def __init__(self, device: SimulatedDevice, *, initial: int, maximum: int) -> None: ...

class OffloadPlanner:
    """
    Native planner of the offloads and reloads of a step; see solvers.swap.
    """

    def __init__(self, seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], load: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], last: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], use: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], back: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], source: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], circular: bool, duplex: bool) -> None: ...

    def plan(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], limit: int, rounds: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], float, int]:
        """
        Absences, their release and fetch, the stall and the peak; a stall of inf where the limit cannot be held.
        """

    def improve(self, out: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], release: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], fetch: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], limit: int, work: float, seed: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], float]:
        """
        Out, release and fetch of each absence after so much work, none where release >= fetch.
        """

    def select_without_stall(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], limit: int) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], float, int]:
        """The same without any stall; the peak may be over the limit."""

class Jobs:
    """
    Packing problem: job j owns the next pieces[j] of the pieces of lifetime [start, end).
    """

    def __init__(self, pieces: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], fixed: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def __len__(self) -> int: ...

    @property
    def start_order(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """Jobs by start, those across the cut of a circle first."""

class FitPacker:
    """First fit or best fit in a given order."""

    def __init__(self, jobs: Jobs) -> None: ...

    def begin(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, best_fit: bool = False) -> None: ...

    def advance(self, budget: int) -> bool:
        """
        Continue for about `budget` work units; return true if all jobs are placed.
        """

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def work(self) -> int:
        """Work units spent so far; one is about one comparison of first fit."""

class LocalRepair:
    """Repair of a plan around the highest job, place by place."""

    def __init__(self, jobs: Jobs, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int) -> None: ...

    def advance(self, budget: int, target: int) -> bool:
        """
        Continue for about `budget` work units; return true if a smaller arena was found.
        """

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def work(self) -> int:
        """Work units spent so far; one is about one comparison of first fit."""

class SkylineSearch:
    """
    Complete search over skyline valleys for offsets within a capacity; one piece per job.
    """

    def __init__(self, jobs: Jobs, capacity: int, seed: int, rules: int = 31) -> None: ...

    def advance(self, budget: int) -> bool:
        """
        Continue for about `budget` work units; return true if a plan, or a proof that no plan exists, was found.
        """

    @property
    def found(self) -> bool: ...

    @property
    def infeasible(self) -> bool: ...

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def nodes(self) -> int: ...

    @property
    def work(self) -> int:
        """Work units spent so far; one is about one comparison of first fit."""

class PairwiseSearch:
    """
    Complete search over the vertical order of each two jobs, within a capacity.
    """

    def __init__(self, jobs: Jobs, capacity: int, seed: int) -> None: ...

    def advance(self, budget: int) -> bool:
        """
        Continue for about `budget` work units; return true if a plan, or a proof that no plan exists, was found.
        """

    @property
    def found(self) -> bool: ...

    @property
    def infeasible(self) -> bool: ...

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def nodes(self) -> int: ...

    @property
    def work(self) -> int:
        """Work units spent so far; one is about one comparison of first fit."""

class Cancel:
    """Flag that makes a kernel on another thread give up."""

    def __init__(self) -> None: ...

    def cancel(self) -> None: ...

def fixed_conflict(jobs: Jobs) -> tuple[int, int] | None:
    """Return two jobs whose fixed offsets overlap, or None."""

def stack_bound(jobs: Jobs, steps: int) -> int:
    """
    Return a lower bound in bytes on the height of a stack of jobs that all meet, found in about `steps` steps.
    """

def count_waits(start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], columns: int, period: int) -> int:
    """
    Return the number of waits of one stream for another in `columns` iterations; `offset` is row by row.
    """

def load_curve(owner: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
    """
    Return the times at which lifetimes start or end, and the bytes alive from each time on; the period of a line is 0.
    """

def load_extremes(owner: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int) -> tuple[int, int]:
    """
    Return the peak of the load curve and the first time of the lowest load; zeros for an empty curve.
    """

def to_line(owner: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int, cut: int, by_start: bool) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
    """
    Return the buffer and the number of pieces of each job, and start and end of each piece on the line from `cut`. The given pieces are sorted by (owner, start); the period of a line is 0.
    """

def write_offsets(into: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], job: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Write offset[k] into column job[k] / len(rows) of row rows[job[k] % len(rows)], unless job[k] is negative.
    """

def pack_in_order(jobs: Jobs, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cancel: Cancel) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Return offsets by lowest valley first, the first job in `order` that fits; no offsets if cancelled.
    """

def pack_max_load_first(jobs: Jobs, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], goal: int, cancel: Cancel) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Return offsets by maximum load first for an arena of `goal` bytes, no offsets if cancelled; `order` is the order of the jobs with gaps.
    """

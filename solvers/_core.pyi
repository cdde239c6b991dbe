"""Native part of solvers: packing kernels, simulated allocators."""

from collections.abc import Sequence
from typing import Annotated

import numpy
import numpy.typing
from numpy.typing import NDArray


class SimulatedDevice:
    """Addresses without memory, and a limit in bytes."""

    def __init__(self, limit: int, floor: int = 0) -> None:
        """Own addresses begin above the floor."""

    def answer(self, size: int, address: int) -> None:
        """
        Where a reservation of that size lies, the first that has no earlier answer.
        """

    @property
    def limit(self) -> int: ...

    @property
    def calls(self) -> int: ...

    @property
    def segments(self, /) -> tuple[numpy.typing.NDArray[numpy.int64], ...]:
        """
        Columns address, size, stream, region, start, end; the end is -1 of what is still held.
        """

LARGEST_DEVICE: int = 72057594037927936

class SimulatedAllocator:
    """What takes from a device and serves requests, once."""

    def run(self, kind: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu', writable=False)], birth: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], adopted: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], address: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None = None) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], int]:
        """
        Address of each alloc, bytes live and reserved after each event, and the first alloc that failed, or -1. `birth` is the row of the alloc of each event's buffer. What led to the first state comes first, as `adopted` events: handles of the buffers alive in it, -1 for the others. With the column `address`, what the recorded allocator gave back is given back.
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
        A segment that was there before, and the blocks that were in use in it, by address; their handles. `slack` is how much further each may reach into what is free behind it.
        """

    def learned(self) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
        """
        Handles of adopted blocks, and where they must end for the addresses that were recorded; later ones count.
        """

class SimulatedPyTorchExpandable(SimulatedAllocator):
    """The same with expandable segments."""

    def __init__(self, device: SimulatedDevice, rules: PyTorchRules) -> None: ...

class SimulatedCupy(SimulatedAllocator):
    """CuPy's pool."""

    def __init__(self, device: SimulatedDevice) -> None: ...

class SimulatedCnmem(SimulatedAllocator):
    """CNMeM, which takes so many bytes first, and perhaps more."""

    def __init__(self, device: SimulatedDevice, *, first: int, grows: bool) -> None: ...

class SimulatedBfc(SimulatedAllocator):
    """TensorFlow's best fit with coalescing."""

    def __init__(self, device: SimulatedDevice, *, region: int, slack: int, collects: bool) -> None: ...

class SimulatedBuddy(SimulatedAllocator):
    """The binary buddy system."""

    def __init__(self, device: SimulatedDevice, *, least: int, region: int) -> None: ...

class SimulatedRmmPool(SimulatedAllocator):
    """RMM's pool; no maximum is -1."""

    def __init__(self, device: SimulatedDevice, *, initial: int, maximum: int) -> None: ...

class SimulatedRmmBinning(SimulatedAllocator):
    """RMM's bins of 2**least to 2**most bytes over its pool."""

    def __init__(self, device: SimulatedDevice, *, least: int, most: int, blocks: int, initial: int, maximum: int) -> None: ...

class SimulatedRmmArena(SimulatedAllocator):
    """RMM's arena of so many bytes."""

    def __init__(self, device: SimulatedDevice, *, bytes: int) -> None: ...

class OffloadPlanner:
    """
    Native planner of the offloads and reloads of a step; see solvers.swap.
    """

    def __init__(self, seconds: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], load: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], last: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], use: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], back: Annotated[NDArray[numpy.float64], dict(shape=(None,), order='C', device='cpu', writable=False)], source: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], circular: bool, duplex: bool) -> None: ...

    def plan(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], limit: int, rounds: int, reload_weight: float = 1.0) -> tuple[Annotated[NDArray[numpy.int32], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], float, int]:
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
    What is packed; job j owns the next pieces[j] of the pieces [start, end).
    """

    def __init__(self, pieces: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], alignment: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], fixed: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    def __len__(self) -> int: ...

    @property
    def at_peak(self) -> int:
        """Jobs that are alive where most bytes are, first."""

    @property
    def earliest_first(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """The jobs by their starts, those across the cut of a circle first."""

class Packer:
    """First or best fit in a given order."""

    def __init__(self, jobs: Jobs) -> None: ...

    def begin(self, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, best_fit: bool = False, inner: bool = False) -> None: ...

    def advance(self, budget: int) -> bool:
        """Go on for about `budget` looks; whether all jobs are placed."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def looks(self) -> int: ...

class Search:
    """Seeded search over orders for lowest valley first."""

    def __init__(self, jobs: Jobs, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int) -> None: ...

    def advance(self, budget: int, target: int) -> bool:
        """Go on for about `budget` looks; whether a smaller arena was found."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def looks(self) -> int: ...

class Repair:
    """Makes a plan lower, place by place."""

    def __init__(self, jobs: Jobs, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int) -> None: ...

    def advance(self, budget: int, target: int) -> bool:
        """Go on for about `budget` looks; whether a smaller arena was found."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def looks(self) -> int: ...

class Stretches:
    """Makes a plan lower, one stretch of time after the other."""

    def __init__(self, jobs: Jobs, offsets: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], seed: int) -> None: ...

    def advance(self, budget: int, target: int) -> bool:
        """Go on for about `budget` looks; whether a smaller arena was found."""

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def looks(self) -> int: ...

class Outward:
    """Packs what is alive at the peak, then what is near it, then the rest."""

    def __init__(self, jobs: Jobs, goal: int, seed: int, tries: int = 6) -> None: ...

    def advance(self, budget: int) -> bool:
        """
        Go on for about `budget` looks, or until it is given up; whether all is placed: near the peak within the goal.
        """

    @property
    def offsets(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]: ...

    @property
    def arena(self) -> int: ...

    @property
    def given_up(self) -> bool: ...

    @property
    def looks(self) -> int: ...

class Branching:
    """Complete search for offsets within a capacity; one piece a job."""

    def __init__(self, jobs: Jobs, capacity: int, seed: int, rules: int = 127) -> None: ...

    def advance(self, budget: int) -> bool:
        """
        Go on for about `budget` looks; whether a plan, or a proof that there is none, was found.
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
    def looks(self) -> int: ...

class Pairs:
    """Complete search for which of two jobs is below, within a capacity."""

    def __init__(self, jobs: Jobs, capacity: int, seed: int, rules: int = 63) -> None: ...

    def advance(self, budget: int) -> bool:
        """
        Go on for about `budget` looks; whether a plan, or a proof that there is none, was found.
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
    def looks(self) -> int: ...

def clash(jobs: Jobs) -> tuple[int, int] | None:
    """Two jobs whose fixed offsets contradict each other, or None."""

def stack_bound(jobs: Jobs, steps: int) -> int:
    """
    How high jobs that all meet must stand at least, found in about so many steps.
    """

def count_waits(start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], stream: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], columns: int, period: int) -> int:
    """
    Waits of one stream for another in `columns` iterations; streams count from 0, `offset` is row by row.
    """

class Cancel:
    """Tells a kernel on another thread to give up."""

    def __init__(self) -> None: ...

    def cancel(self) -> None: ...

def load_curve(owner: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
    """
    Times at which something starts or ends, and the bytes alive from each; on a line where the period is 0.
    """

def load_extremes(owner: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int) -> tuple[int, int]:
    """
    The highest load of that curve, and the first time of its lowest; zeros where it is empty.
    """

def on_line(owner: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], end: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], period: int, cut: int, by_start: bool) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))], Annotated[NDArray[numpy.int64], dict(shape=(None,))]]:
    """
    Buffer and number of pieces of each job, and start and end of each piece on the line from `cut`. Pieces are sorted by (owner, start) on a circle, or with the period 0 on a line.
    """

def put(into: Annotated[NDArray[numpy.int64], dict(shape=(None, None), order='C', device='cpu')], rows: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], job: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], offset: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None:
    """
    Write offset[k] into column job[k] / len(rows) of row rows[job[k] % len(rows)], where job[k] is not negative.
    """

def skyline(jobs: Jobs, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], cancel: Cancel) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Offsets by lowest valley first, none when cancelled; `order` decides where several jobs fit.
    """

def peak_first(jobs: Jobs, cancel: Cancel) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Offsets of what is alive at the peak first, then either side by lowest valley first; none when cancelled.
    """

def fullest(jobs: Jobs, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], goal: int, cancel: Cancel) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Offsets by what is alive, none when cancelled, for an arena of `goal` bytes; `order` is that of the jobs that have gaps.
    """

def below(jobs: Jobs, order: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], ceiling: int, goal: int, doubt: float, seed: int, cancel: Cancel) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Offsets, by what is alive, of what fits below `ceiling`, -1 for the others; none when cancelled. All of them should fit in `goal` bytes; `doubt` is a part of that by which loads are taken for more than they are.
    """

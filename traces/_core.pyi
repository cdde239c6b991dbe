"""Native part of traces."""

from collections.abc import Callable
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray


def tail_period(values: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], repeats: int) -> tuple[int, int]:
    """
    Return period and length of the longest tail with at least `repeats` periods; (0, 0) if there is none.
    """

def align_backwards(sizes: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], least: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], most: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Annotated[NDArray[numpy.int64], dict(shape=(None,))]:
    """
    Return int64[n], the place of each of n allocations in repetitions of a sequence: 0 or more in the last repetition, negative in earlier ones, the largest int64 for an allocation without a counterpart. The alignment runs backwards and is greedy.
    """

def iterations_start(sequence: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    Return the first allocation of the iterations at the end of the sequences; -1 if the main sequence does not repeat.
    """

def sequence_with_most_bytes(sequence: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """Return the sequence that allocates most bytes, the lowest of several."""

LEAST_EVIDENCE: int = 24

LEAST_REPEATS: int = 3

def iterations_start_without_rare_sizes(sequence: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    Return the same as `iterations_start` for the allocations without rare sizes, if most allocations remain.
    """

LEAST_RARE: int = 2

MOST_RARE: int = 32

LEAST_KEPT: float = 0.9

LEAST_EVIDENCE_BUT_RARE: int = 256

LEAST_REPEATS_BUT_RARE: int = 4

def least_load_position(row: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], freed_before: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, period: int) -> int:
    """
    Return the position in the periods from `start` on at which the fewest temporary bytes are alive.
    """

class Refused(ValueError):
    pass

class Snapshot:
    """The events of a memory snapshot."""

    @property
    def columns(self) -> dict[str, numpy.typing.NDArray[Any]]: ...

    @property
    def names(self) -> list[str]: ...

    @property
    def settings(self) -> object: ...

    @property
    def actions(self) -> dict[str, int]: ...

    @property
    def skipped(self) -> dict[str, int]: ...

    @property
    def known(self) -> list[tuple[int, int, int]]:
        """
        Number of events, and bytes live and reserved before the first event, of each device.
        """

    @property
    def device_free(self) -> list[int]:
        """Bytes free on the device at each refused request, -1 where unknown."""

    @property
    def alive_before(self) -> int: ...

    @property
    def expandable(self) -> bool: ...

def is_library_file(path: str) -> bool:
    """
    Return true if the path of a source file belongs to an installed library or to Python itself.
    """

def read_snapshot(descriptor: int, total: int, lenient: bool, paths: bool, progress: Callable[[int, int], object] | None) -> Snapshot:
    """
    Read a snapshot from an open file of `total` bytes (0: unknown) and report progress; raise `Refused` with the reason.
    """

class Living:
    """
    Table of the living buffer at each address of a device; impossible events raise `Refused`.
    """

    def __init__(self) -> None: ...

    def alloc(self, address: int, size: int, buffer: int) -> None:
        """Add a buffer by its number."""

    def free(self, address: int, size: int, unknown: int) -> int:
        """
        Remove and return the buffer at an address; return `unknown`, a buffer of `size` bytes from before the recording, if the address is new.
        """

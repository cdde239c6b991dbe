"""Native part of traces."""

from collections.abc import Callable
from typing import Annotated, Any

import numpy
import numpy.typing
from numpy.typing import NDArray


def tail_period(values: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], repeats: int) -> tuple[int, int]:
    """
    Period and length of the longest tail that repeats at least so often; (0, 0) where there is none.
    """

def iterations_start(sequence: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    The first allocation of the iterations that the sequences end with; -1 where the main one does not repeat.
    """

def sequence_with_most_bytes(sequence: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """The sequence that allocates most bytes, of several the lowest."""

LEAST_EVIDENCE: int = 24

LEAST_REPEATS: int = 3

def iterations_start_without_rare_sizes(sequence: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    The same for what does not vary: without the sizes that come rarely, if most stays.
    """

LEAST_RARE: int = 2

MOST_RARE: int = 32

LEAST_KEPT: float = 0.9

LEAST_EVIDENCE_BUT_RARE: int = 256

LEAST_REPEATS_BUT_RARE: int = 4

def least_load_position(row: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], freed_before: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], start: int, period: int) -> int:
    """
    The place in the periods from `start` on at which least of what comes and goes is alive.
    """

class Refused(ValueError):
    pass

class Snapshot:
    """What a memory snapshot says."""

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
        Of each device its events, and the bytes that were live and reserved before the first of them.
        """

    @property
    def device_free(self) -> list[int]:
        """
        Bytes that were free on the device at each refused request; -1 where unknown.
        """

    @property
    def alive_before(self) -> int: ...

    @property
    def expandable(self) -> bool: ...

def is_library_file(path: str) -> bool:
    """
    Tell whether a source file, by its path, is of an installed library or of Python itself.
    """

def read_snapshot(descriptor: int, total: int, lenient: bool, paths: bool, progress: Callable[[int, int], object] | None) -> Snapshot:
    """
    Read a snapshot from an open file of `total` bytes (0: unknown), of which `progress` is told; Refused says why not.
    """

class Living:
    """
    Which buffer lives at which address of a device; what cannot be is Refused.
    """

    def __init__(self) -> None: ...

    def alloc(self, address: int, size: int, buffer: int) -> None:
        """A buffer, by its number, is born."""

    def free(self, address: int, size: int, unknown: int) -> int:
        """
        The buffer that is freed; `unknown`, of so many bytes, where none was ever seen there.
        """

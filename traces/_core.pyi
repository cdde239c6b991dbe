"""Native part of traces."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def tail_period(values: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], repeats: int) -> tuple[int, int]:
    """
    Period and length of the longest tail that repeats at least so often; (0, 0) where there is none.
    """

def iterations_begin(sequence: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    The first allocation of the iterations that the sequences end with; -1 where the main one does not repeat.
    """

LEAST_EVIDENCE: int = 24

LEAST_REPEATS: int = 3

def iterations_begin_but_rare(sequence: Annotated[NDArray[numpy.uint32], dict(shape=(None,), order='C', device='cpu', writable=False)], size: Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> int:
    """
    The same for what does not vary: without the sizes that come rarely, if most stays.
    """

LEAST_RARE: int = 2

MOST_RARE: int = 32

LEAST_KEPT: float = 0.9

LEAST_EVIDENCE_BUT_RARE: int = 256

LEAST_REPEATS_BUT_RARE: int = 4

"""Native part of traces."""

from typing import Annotated

import numpy
from numpy.typing import NDArray


def tail_period(values: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], repeats: int) -> tuple[int, int]:
    """
    Period and length of the longest tail that repeats at least so often; (0, 0) where there is none.
    """

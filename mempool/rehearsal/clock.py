"""Modelled time of a rehearsed program: a card's roofline time for kernels, the link's time for copies.

    clock.start(rates_of("H100", (9, 0)), PRESETS["pcie5"])
    ...  # a step
    torch.cuda.synchronize()
    seconds = clock.now()

Events, streams and waits behave as on a GPU, so ``torch.cuda.Event.elapsed_time`` gives modelled times. The
host's work takes no modelled time, so a GPU never waits for the host's calls.
"""

from __future__ import annotations

import contextlib
import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mempool.errors import UsageError
from mempool.rehearsal import standin

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.hardware.gpu_throughput import Rates
    from solvers.swap import Link


@dataclass(frozen=True)
class Reached:
    """Shares of the published rates that PyTorch's kernels reach, fitted to an H100.

    The first, second and last share are each fitted to one run; docs/benchmarks.md has the figures.

    Attributes:
        single: products and convolutions in 32 bits.
        tensor_cores: products and convolutions in 16 bits, or in 32 bits with rounding (TF32).
        bytes: memory bandwidth of copies within a device and of elementwise kernels.
        pageable: share of the link's rate for host memory that is not page-locked.
    """

    single: float = 0.64
    tensor_cores: float = 0.4
    bytes: float = 0.85
    pageable: float = 0.214


REACHED = Reached()
_bytes_per_nanosecond = 0.0  #: bandwidth of a device's memory; 0 without a clock


def start(rates: Rates, link: Link, reached: Reached = REACHED) -> None:
    """Start modelling time on the stand-in; call this after the import of PyTorch.

    Raises:
        UsageError: no C++ compiler is installed, or the stand-in is not loaded.
    """
    from mempool.torch.compiled_library import Source

    global _bytes_per_nanosecond
    library = ctypes.CDLL(str(standin.LIBRARY))
    fixed = [1e9 * link.out_fixed, 1e9 * link.out_per_byte, 1e9 * link.in_fixed, 1e9 * link.in_per_byte]
    pageable = 1e9 * max(link.out_per_byte, link.in_per_byte) / reached.pageable
    memory = 1e9 / (reached.bytes * rates.bandwidth)
    library.mempool_standin_start_clock(
        *map(ctypes.c_double, fixed),
        int(link.duplex),
        ctypes.c_double(pageable),
        ctypes.c_double(memory),
    )
    source = Source(
        Path(__file__).with_name("operation_times.cpp"), ("c10", "torch_cpu"), "mempool_operation_times_start"
    )
    rounded = max(reached.single * rates.single, reached.tensor_cores * rates.convolutions)
    products = reached.single * rates.single, rounded, reached.tensor_cores * rates.half
    per_nanosecond = [ctypes.c_double(rate / 1e9) for rate in (*products, reached.bytes * rates.bandwidth)]
    _bytes_per_nanosecond = reached.bytes * rates.bandwidth / 1e9
    observer = source.load()  # never unloaded: PyTorch calls it
    if not observer.mempool_operation_times_start(*per_nanosecond):
        raise UsageError("modelled time needs the stand-in for CUDA, which is not loaded in this process")


def now() -> float:
    """Return the modelled time, in seconds, of the host's last wait; 0 without a clock."""
    library = ctypes.CDLL(str(standin.LIBRARY))
    library.mempool_standin_time.restype = ctypes.c_int64
    return float(library.mempool_standin_time()) / 1e9


@contextlib.contextmanager
def bandwidth_bound(moved: int) -> Iterator[None]:
    """Set the time of the block's first kernel to that of moving ``moved`` bytes in device memory."""
    if not _bytes_per_nanosecond:
        yield
        return
    library = ctypes.CDLL(str(standin.LIBRARY))
    library.mempool_standin_begin_operation()
    try:
        yield
    finally:
        library.mempool_standin_end_operation(ctypes.c_double(moved / _bytes_per_nanosecond))

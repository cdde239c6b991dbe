"""Options of the backend, as given to `torch.compile`, and the tunables that no user sets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from mempool.errors import UsageError
from mempool.settings import parse_limit
from mempool.units import parse_bytes
from solvers.swap.link import Link, parse_link

INNER = ("inductor", "eager")
#: An unreachable limit in bytes, in effect until a relative limit is decided.
UNDECIDED = 1 << 60


@dataclass(frozen=True)
class Options:
    """Validated options.

    Attributes:
        limit: most bytes of device memory for a step, `UNDECIDED` for a share of the peak; None: no limit,
            and PyTorch's graphs stay unchanged.
        inner: the compiler of the graphs: "inductor", or "eager", which runs each operation by itself.
        link: the transfer times of copies; None: measured on this machine when needed.
        host_limit: most bytes of host memory for copies; 0: half of the free memory.
        beside: bytes within the limit that are outside all graphs, such as the optimizer's state.
        name: name of the model in the report; models with the same name and options share one limit.
        share: the limit as a share of a graph's peak without a limit, 0 to 1; 0: the limit is in bytes.
    """

    limit: int | None = None
    inner: str = "inductor"
    link: Link | None = None
    host_limit: int = 0
    beside: int = 0
    name: str = ""
    share: float = 0.0

    @property
    def fused(self) -> bool:
        """Return true if a compiler fuses operations into kernels."""
        return self.inner != "eager"


@dataclass(frozen=True)
class Tunables:
    """Constants of measurements, searches and observations; users cannot set them.

    Attributes:
        timed_runs: timed runs per distinct call of an operation, after one warm-up run; the median
            counts.
        fused_share: share of an operation's stand-alone time that the operation adds to a fused
            kernel, if it neither reads arguments from memory nor writes results to memory.
        copies: copies of one round when the cost of a copy for the program is measured.
        copy_rounds: rounds of that measurement; the best round counts.
        small_copy_bytes: sizes in bytes of the measured synchronous copies if only small copies are
            synchronous; asynchronous copies are measured with the first size.
        all_copy_bytes: sizes in bytes of the measured synchronous copies if all copies are
            synchronous.
        timed_steps: latest runs of each graph from which the median time is taken; the first runs
            warm up.
        room_steps: most steps of the search for the largest room between the passes.
        host_steps: steps of the search for the fewest kept bytes if the host is too small.
        limit_tolerance: tolerance of the search for the least limit that the graphs of a function
            can hold together, as a share of that limit.
        shared_limits: most calls of `torch.compile` whose graphs are remembered for the report.
        decision_rounds: most decisions per graph while searching for one whose runs keep no more
            bytes than the decision assumed.
        kept_steps: steps of the binary search for the bytes that each run may keep in excess of the bytes
            that a run must keep.
        observed_steps: steps that are observed after a compilation.
        observed_runs: most runs that are observed after a compilation.
        recompilations: most recompilations of a graph because of observations.
        ignored_rise: ignored rise of the high-water mark, as a share of the limit; some programs slowly
            collect data.
        ignored_excess: ignored excess over a limit, as a share of the limit.
        searched_parameters: least number of parameters whose referrers are searched for the optimizers'
            state.
        size_doublings: most doublings of the dynamic sizes in the search for the sizes that fit.
        size_halvings: steps of the binary search that follows the doublings.
        same_kernels_share: if the compiler's own kernels exceed the limit by at most this share, a request
            reduced by the excess uses the same kernels again instead of small kernels.
        unused_share: a request for more bytes pays only if a larger share of the limit is unused.
        lost_share: a request for more bytes pays only if a larger share of a step's time is lost.
        lower_requests: most requests of a lower limit.
        higher_requests: most requests of a higher limit.
        small_kernel_buffers: most distinct buffers that a small kernel reads and writes (inductor's
            `max_fusion_unique_io_buffers`).
        small_kernel_reads: reads after which a sum is stored in small kernels (inductor's
            `realize_acc_reads_threshold`).
    """

    timed_runs: int = 5
    fused_share: float = 0.2
    copies: int = 16
    copy_rounds: int = 7
    small_copy_bytes: tuple[int, ...] = (4096, 64 << 10, 256 << 10)
    all_copy_bytes: tuple[int, ...] = (4096, 256 << 10, 4 << 20)
    timed_steps: int = 32
    room_steps: int = 16
    host_steps: int = 4
    limit_tolerance: float = 0.01
    shared_limits: int = 64
    decision_rounds: int = 8
    kept_steps: int = 4
    observed_steps: int = 3
    observed_runs: int = 4096
    recompilations: int = 4
    ignored_rise: float = 1 / 64
    ignored_excess: float = 1 / 256
    searched_parameters: int = 16
    size_doublings: int = 16
    size_halvings: int = 6
    same_kernels_share: float = 0.04
    unused_share: float = 0.05
    lost_share: float = 0.02
    lower_requests: int = 4
    higher_requests: int = 2
    small_kernel_buffers: int = 8
    small_kernel_reads: int = 3


TUNABLES = Tunables()


def parse_options(given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Validate the options given to `torch.compile`.

    Raises:
        UsageError: an unknown name, an impossible value, or any mode, since the backend has no modes.
    """
    if mode is not None:
        raise UsageError(
            f"backend 'mempool' has no mode {mode!r}: it has options, such as {{'limit': '8GiB'}}"
        )
    if not isinstance(given or {}, Mapping):
        raise UsageError(f"options are {given!r}, no dictionary such as {{'limit': '8GiB'}}")
    given = dict(given or {})
    known = [field.name for field in fields(Options) if field.name != "share"]
    for name in given:
        if name not in known:
            raise UsageError(f"backend 'mempool' has no option {name!r}; there are {', '.join(known)}")
    values: dict[str, Any] = {
        name: _CHECKS[name](name, value) for name, value in given.items() if value is not None
    }
    if isinstance(share := values.get("limit"), str):
        values |= {"limit": UNDECIDED, "share": float(share.rstrip("%")) / 100}
    return Options(**values)


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        raise UsageError(f"{name} is {value!r}, no size in bytes, such as '8GiB'")
    size = parse_bytes(value if isinstance(value, str) else int(value))
    if size < 0 or (size == 0 and name != "beside"):
        raise UsageError(f"{name} is {value!r}: it must be more than 0 bytes")
    return size


def _limit(name: str, value: Any) -> int | str:
    """Return bytes, or a share such as "80%"."""
    is_share = isinstance(value, str) and value.strip().endswith("%")
    return parse_limit(value) if is_share else _bytes(name, value)


def _inner(_: str, value: Any) -> str:
    if value not in INNER:
        raise UsageError(f"inner is {value!r}; there are {' and '.join(map(repr, INNER))}")
    return str(value)


def _link(_: str, value: Any) -> Link:
    if isinstance(value, Link):
        return value
    if not isinstance(value, str):
        raise UsageError(f"link is {value!r}, neither a Link nor a text such as 'pcie4'")
    try:
        return parse_link(value)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _name(_: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"name is {value!r}, no text such as 'teacher'")
    return value


_CHECKS: dict[str, Any] = {
    "limit": _limit,
    "inner": _inner,
    "link": _link,
    "host_limit": _bytes,
    "beside": _bytes,
    "name": _name,
}

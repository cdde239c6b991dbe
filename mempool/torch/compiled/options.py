"""The options of the backend, as given to `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from mempool.errors import UsageError
from mempool.units import parse_bytes
from solvers.swap.link import Link, parse_link

INNER = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """Validated options.

    Attributes:
        limit: most bytes of device memory for a step; None: no limit.
        inner: the compiler of the graphs: "inductor", or "eager", which runs each operation by itself.
        link: the transfer times of copies; None: measured on this machine when needed.
        host_limit: most bytes of host memory for copies; 0: half of the free memory.
        beside: bytes on the device outside all graphs, such as the optimizer's state: part of the limit.
        threshold: without a limit, offload every value whose distance in levels exceeds this number; None:
            offload nothing.
        include: name filters for module paths and operations: only matching results are offloaded; empty:
            all.
        exclude: name filters for module paths and operations whose results stay.
        name: name of the model in the report; models with the same name and options share one limit.
    """

    limit: int | None = None
    inner: str = "inductor"
    link: Link | None = None
    host_limit: int = 0
    beside: int = 0
    threshold: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    name: str = ""

    @property
    def rewrites(self) -> bool:
        """Return true if values may be offloaded or recomputed; otherwise PyTorch's graphs stay unchanged."""
        return self.limit is not None or self.threshold is not None

    @property
    def fused(self) -> bool:
        """Return true if a compiler fuses operations into kernels."""
        return self.inner != "eager"


def parsed(given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
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
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            raise UsageError(f"backend 'mempool' has no option {name!r}; there are {', '.join(known)}")
    values: dict[str, Any] = {
        name: _CHECKS[name](name, value) for name, value in given.items() if value is not None
    }
    if values.keys() >= {"limit", "threshold"}:
        raise UsageError("a limit decides what leaves, and so does a threshold: give one of them")
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


def _threshold(_: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UsageError(f"threshold is {value!r}, no number of levels")
    return value


def _name(_: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UsageError(f"name is {value!r}, no text such as 'teacher'")
    return value


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else value
    if not isinstance(patterns, (list, tuple)) or not all(isinstance(one, str) for one in patterns):
        raise UsageError(f"{name} is {value!r}, no patterns such as 'encoder.*'")
    return tuple(patterns)


_CHECKS: dict[str, Any] = {
    "limit": _bytes,
    "inner": _inner,
    "link": _link,
    "host_limit": _bytes,
    "beside": _bytes,
    "threshold": _threshold,
    "include": _patterns,
    "exclude": _patterns,
    "name": _name,
}

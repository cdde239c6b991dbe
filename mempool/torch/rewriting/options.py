"""What is asked of the backend: the options of `torch.compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from mempool.errors import UsageError
from mempool.settings import parse_bytes
from solvers.swap.link import Link, parse_link

INNER = ("inductor", "eager")


@dataclass(frozen=True)
class Options:
    """Options, checked.

    Attributes:
        limit: most bytes that the step takes of the device; None: as many as it likes.
        inner: who compiles the graphs: "inductor", or "eager", which runs them as they are.
        link: what copies take; None: measured on this machine when it is needed.
        host_limit: most bytes of the host that copies take; 0: half of what is free.
        beside: bytes on the device that no graph sees, such as the optimizer's state: part of the limit.
        threshold: without a limit, send everything away whose distance in levels is more than this; None:
            nothing.
        include: patterns of modules' paths and operations' names: only what these make leaves; none: all.
        exclude: patterns of those whose results stay.
        name: of the model, for its report; models of one name and the same other options share one limit.
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
        """Whether anything may leave or be made again; else graphs are what PyTorch makes of them."""
        return self.limit is not None or self.threshold is not None

    @property
    def fused(self) -> bool:
        """Whether a compiler makes kernels of several operations each."""
        return self.inner != "eager"


def parsed(given: Mapping[str, Any] | None, mode: str | None = None) -> Options:
    """Options as they are given to `torch.compile`.

    Raises:
        UsageError: an unknown name, an impossible value, or a mode, of which there are none.
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

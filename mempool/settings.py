"""Settings of a pool, and the framework versions that the tests have run on.

Call arguments override environment variables, which override defaults:

==================== ========================================================================================
``MEMPOOL``          ``off``: adapters install nothing; ``record``: record and plan nothing; ``replay``:
the default
``MEMPOOL_PLAN``     a plan file to replay from the first iteration
``MEMPOOL_REMEMBER``  ``1``: replay the plan of the program's last run, and keep this run's; ``fresh``: only
keep it; ``0``: neither
``MEMPOOL_RECORD``   a trace file to write
``MEMPOOL_MAX_RESERVED``  most bytes to hold from the device, such as ``8GiB`` or ``500MB``
``MEMPOOL_LIMIT``      most bytes that PyTorch's tensors take on the device, kept by offloading
``MEMPOOL_HOST_LIMIT``  most bytes of host memory that offloading takes
``MEMPOOL_WAIT_BYTES``  bytes that a plan must save per wait between streams: ``1MiB``, ``never``
``MEMPOOL_BACKEND``  of PyTorch on a GPU: ``guest``: the pool serves planned tensors in front of PyTorch's
allocator, the default where possible; ``pluggable``: the pool replaces PyTorch's allocator
``MEMPOOL_MEMORY``   of a GPU: ``plain``; ``growing``: the arena grows and shrinks in place, the default for
PyTorch; ``managed``: may exceed the GPU's memory
``MEMPOOL_CHECK``    ``1``: redzones, poison on free, double and foreign frees named (slow; host only)
``MEMPOOL_EXPLAIN``  ``1``: log the first divergences and their remedies
``MEMPOOL_FLIGHT``   a file for the newest calls of pools and CUDA driver, see `traces.formats.flight`
==================== ========================================================================================
"""

from __future__ import annotations

import functools
import operator
import os
import re
import sys
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mempool.errors import UsageError
from mempool.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

Mode = Literal["off", "record", "replay"]
Memory = Literal["plain", "growing", "managed"]
Backend = Literal["pluggable", "guest"]
#: Value of ``wait_bytes`` at which streams share no memory.
NEVER = 2**63 - 1
#: Limit of retained free memory, in bytes, that keeps all of it.
EVERYTHING = 1 << 62
#: Largest ``small_bytes``; the core's size classes end here.
MOST_SMALL_BYTES = 1024


@dataclass(frozen=True)
class Settings:
    """Settings of a pool.

    Attributes:
        mode: "off", "record" (record only) or "replay" (record, plan, replay).
        plan: plan file to start from, or None.
        remember: keep the plan of this run in the cache folder, and start from the plan of the program's last
            run. "fresh": start without a plan. "long": keep the plan only if the run takes some seconds.
            Ignored with a plan file or a limit of offloading.
        record: trace file to write, or None.
        max_reserved: largest size of the arena and all segments together, in bytes, or None.
        limit: most bytes that PyTorch's tensors take on the device; idle tensors are offloaded to host
            memory. "80%": that share of the first iteration's peak. None: nothing is offloaded. Other pools
            have no such limit.
        host_limit: most bytes of host memory that offloading takes; None: half of the free memory at the
            start.
        wait_bytes: bytes that a plan must save for each wait of one stream for another in an iteration; 0:
            plans are as small as possible; `NEVER`: streams share no memory. None: the adapter's own value.
        backend: how the pool serves PyTorch's tensors on a GPU. "pluggable": instead of PyTorch's allocator;
            "guest": in front of PyTorch's allocator, which serves what the plan does not. None: "guest" where
            possible. Other pools have no choice.
        memory: kind of GPU memory. "plain": device memory; "growing": pages mapped into reserved addresses,
            so that the arena grows and shrinks in place; "managed": unified memory, which may exceed the
            GPU's. Other devices have "plain" only. None: the adapter's own kind.
        small_bytes: requests up to this size never enter a plan; at most 1024.
        check: find buffer overruns, use after free, double and foreign frees; slow, on the host only.
        explain: log the first divergences.
        background: plan in a thread; if false, only `Pool.plan_now` plans.
    """

    mode: Mode = "replay"
    plan: str | None = None
    remember: bool | Literal["fresh", "long"] = False
    record: str | None = None
    max_reserved: int | None = None
    limit: int | str | None = None
    host_limit: int | None = None
    wait_bytes: int | None = None
    backend: Backend | None = None
    memory: Memory | None = None
    small_bytes: int = 512
    check: bool = False
    explain: bool = False
    background: bool = True


def settings(*, environment: bool = True, **given: Any) -> Settings:
    """Return the environment's settings, if read, overridden by the arguments that are not None.

    Raises:
        UsageError: an unknown name or an impossible value.
    """
    known = {name: _checked(name, value) for name, value in given.items() if value is not None}
    return replace(Settings(**(_from_environment() if environment else {})), **known)


def check_swapping(chosen: Settings) -> None:
    """Check the settings of offloading against each other.

    Raises:
        UsageError: a limit above ``max_reserved``, or a ``host_limit`` without a limit.
    """
    limit, most = chosen.limit, chosen.max_reserved
    if limit is None and chosen.host_limit is not None:
        raise UsageError("host_limit needs a limit: give both")
    if isinstance(limit, int) and most is not None and limit > most:
        raise UsageError(
            f"limit is {limit:,} bytes and max_reserved {most:,}: tensors could never take so much"
        )


def _checked(name: str, value: Any) -> Any:
    """Return the checked and converted value of a field of `Settings`."""
    if name not in Settings.__dataclass_fields__:
        raise UsageError(f"the pool has no setting {name!r}")
    if name in _CHECKS:
        return _CHECKS[name](value)
    if not isinstance(value, bool):
        raise UsageError(f"{name} is {value!r}, neither True nor False")
    return value


def _mode(value: Any) -> Any:
    mode = value.strip().lower() if isinstance(value, str) else value
    if mode not in ("off", "record", "replay"):
        raise UsageError(f"MEMPOOL is {value!r}, not off, record or replay")
    return mode


def _memory(value: Any) -> Any:
    memory = value.strip().lower() if isinstance(value, str) else value
    if memory not in ("plain", "growing", "managed"):
        raise UsageError(f"memory is {value!r}, not plain, growing or managed")
    return memory


def _backend(value: Any) -> Any:
    backend = value.strip().lower() if isinstance(value, str) else value
    if backend not in ("pluggable", "guest"):
        raise UsageError(f"backend is {value!r}, not pluggable or guest")
    return backend


def _remember(value: Any) -> Any:
    if isinstance(value, bool) or value in ("fresh", "long"):
        return value
    raise UsageError(f"remember is {value!r}, not True, False, 'fresh' or 'long'")


def _path(name: str, value: Any) -> str:
    if not isinstance(value, (str, bytes, os.PathLike)):
        raise UsageError(f"{name} is {value!r}, not a path")
    if not (path := os.fsdecode(value)):
        raise UsageError(f"{name} is an empty path")
    return path


def _size(name: str, value: Any, *, least: int) -> int:
    """Return a size in bytes; whole floats such as 8e9 are accepted too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not (isinstance(value, str) or hasattr(value, "__index__")):
        raise UsageError(f"{name} is {value!r}, not a size in bytes")
    size = parse_bytes(value if isinstance(value, str) else operator.index(value))
    if not least <= size < 2**63:
        at_least = "a positive number" if least else "a number"
        raise UsageError(f"{name} is {value!r}, not {at_least} of bytes that fits in 63 bits")
    return size


def parse_limit(value: Any) -> int | str:
    """Return bytes, or a share such as "80%"."""
    if not (isinstance(value, str) and value.strip().endswith("%")):
        return _size("limit", value, least=1)
    number = value.strip()[:-1].strip()
    if not re.fullmatch(r"\d{1,3}(\.\d{1,9})?", number) or not 0 < float(number) <= 100:
        raise UsageError(f"limit is {value!r}, not between 0% and 100% of the first iteration's peak")
    return f"{float(number):g}%"


def wait_price(value: Any) -> int:
    """Return the price of a wait: bytes, or `NEVER` for "never".

    Raises:
        UsageError: neither a size nor "never".
    """
    if isinstance(value, str) and value.strip().lower() == "never":
        return NEVER
    return _size("wait_bytes", value, least=0)


def _small_bytes(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UsageError(f"small_bytes is {value!r}, not a number of bytes")
    if not 0 <= operator.index(value) <= MOST_SMALL_BYTES:
        raise UsageError(f"small_bytes is {value}, not between 0 and {MOST_SMALL_BYTES}")
    return operator.index(value)


#: Checks and conversions by field of `Settings`; the other fields are booleans.
_CHECKS: dict[str, Callable[[Any], Any]] = {
    "mode": _mode,
    "plan": functools.partial(_path, "plan"),
    "remember": _remember,
    "record": functools.partial(_path, "record"),
    **{name: functools.partial(_size, name, least=1) for name in ("max_reserved", "host_limit")},
    "limit": parse_limit,
    "wait_bytes": wait_price,
    "backend": _backend,
    "memory": _memory,
    "small_bytes": _small_bytes,
}


def _from_environment() -> dict[str, Any]:
    values: dict[str, Any] = {}
    converters: dict[str, Callable[[str], Any]] = {
        "": _mode,
        "_PLAN": str,
        "_REMEMBER": _remember_from_text,
        "_RECORD": str,
        **{f"_{name.upper()}": _CHECKS[name] for name in ("max_reserved", "limit", "host_limit")},
        "_WAIT_BYTES": wait_price,
        "_BACKEND": _backend,
        "_MEMORY": _memory,
        **{f"_{name}": functools.partial(_flag, f"MEMPOOL_{name}") for name in ("CHECK", "EXPLAIN")},
    }
    for name, convert in converters.items():
        if text := os.environ.get(f"MEMPOOL{name}", "").strip():
            values[name[1:].lower() or "mode"] = convert(text)
    return values


def _remember_from_text(text: str) -> bool | str:
    return text.lower() if text.lower() == "fresh" else _flag("MEMPOOL_REMEMBER", text, "1, 0 or fresh")


def _flag(name: str, text: str, values: str = "1 or 0") -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{name} is {text!r}, not {values}")


#: Oldest and newest tested (major, minor) of each framework.
TESTED = {
    "cupy": ((13, 6), (14, 2)),
    "numpy": ((1, 26), (2, 5)),
    "torch": ((2, 11), (2, 14)),
    "numba": ((0, 68), (0, 68)),
    "rmm": ((26, 10), (26, 10)),
}
_warned: set[str] = set()


def warn_if_untested(framework: str) -> None:
    """Warn once per process if the installed version of a framework is outside the tested range."""
    if framework in _warned:
        return
    _warned.add(framework)
    if (warning := untested(framework)) is not None:
        warnings.warn(warning, RuntimeWarning, stacklevel=3)


def untested(framework: str) -> str | None:
    """Return a warning about the installed version of a framework; None if in the tested range."""
    text = getattr(sys.modules.get(framework), "__version__", None)
    if text is None:
        import importlib.metadata  # a tenth of NumPy's import time

        text = importlib.metadata.version(framework)
    numbers = tuple(int(part) for part in text.split(".")[:2] if part.isdigit())
    oldest, newest = TESTED[framework]
    if oldest <= numbers <= newest:
        return None
    return f"mempool was tested with {framework} {_dotted(oldest)} to {_dotted(newest)}, not with {text}"


def made_with(framework: str) -> str:
    """Return the framework and its version, as "torch 2.13.0"; empty if not imported."""
    version = getattr(sys.modules.get(framework), "__version__", None)
    return "" if version is None else f"{framework} {version}"


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))

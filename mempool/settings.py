"""Settings without code: a call beats a variable of the environment, which beats the default.

==================== ========================================================================================
``MEMPOOL``          ``off``: adapters install nothing; ``record``: record and plan nothing; ``replay``:
the default
``MEMPOOL_PLAN``     a plan file to replay from the first iteration
``MEMPOOL_RECORD``   a trace file to write
``MEMPOOL_MAX_RESERVED``  most bytes to hold from the device, such as ``8GiB`` or ``500MB``
``MEMPOOL_CHECK``    ``1``: redzones, poison on free, double and foreign frees named (slow; host only)
``MEMPOOL_EXPLAIN``  ``1``: log the first divergences and what would help
==================== ========================================================================================
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

Mode = Literal["off", "record", "replay"]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclass(frozen=True)
class Settings:
    """How a pool behaves.

    Attributes:
        mode: "off", "record" (record only) or "replay" (record, plan, replay).
        plan: a plan file to start from, or None.
        record: a trace file to write, or None.
        max_reserved: bytes that the arena and all segments together may hold, or None.
        small_bytes: requests up to this size never enter a plan.
        check: find buffer overruns, use after free, double and foreign frees; slow, on the host only.
        explain: log the first divergences.
        background: plan in a thread; without it, `Pool.plan_now` does.
    """

    mode: Mode = "replay"
    plan: str | None = None
    record: str | None = None
    max_reserved: int | None = None
    small_bytes: int = 512
    check: bool = False
    explain: bool = False
    background: bool = True


def settings(**given: Any) -> Settings:
    """Settings from the environment and, over them, the arguments that are not None.

    Raises:
        UsageError: an unknown name or an impossible value.
    """
    known = {name: _plain(name, value) for name, value in given.items() if value is not None}
    try:
        merged = replace(Settings(**_from_environment()), **known)
    except TypeError as error:
        raise UsageError(str(error).replace("Settings.__init__()", "the pool")) from None
    if merged.mode not in ("off", "record", "replay"):
        raise UsageError(f"MEMPOOL is {merged.mode!r}, not off, record or replay")
    if not 0 <= merged.small_bytes <= 4096:
        raise UsageError(f"small_bytes is {merged.small_bytes}, not between 0 and 4096")
    if merged.max_reserved is not None and merged.max_reserved <= 0:
        raise UsageError("max_reserved is not positive")
    return merged


def parse_bytes(text: str | int) -> int:
    """Bytes of "8GiB", "500 MB", "1e9" or a number.

    Raises:
        UsageError: anything else.
    """
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d{1,2})?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise UsageError(f"{text!r} is not a size in bytes, such as 8GiB or 500MB")
    return int(float(match[1]) * _UNITS[match[2]])


def _plain(name: str, value: Any) -> Any:
    if name in ("plan", "record"):
        return os.fspath(value)
    return parse_bytes(value) if name == "max_reserved" else value


def _from_environment() -> dict[str, Any]:
    found: dict[str, Any] = {}
    converters: dict[str, Callable[[str], Any]] = {
        "": str.lower,
        "_PLAN": str,
        "_RECORD": str,
        "_MAX_RESERVED": parse_bytes,
        "_CHECK": _flag,
        "_EXPLAIN": _flag,
    }
    for name, convert in converters.items():
        if text := os.environ.get(f"MEMPOOL{name}", "").strip():
            found[name[1:].lower() or "mode"] = convert(text)
    return found


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise UsageError(f"{text!r} is neither 1 nor 0")

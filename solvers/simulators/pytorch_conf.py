"""Settings of PyTorch's allocator as text: ``PYTORCH_CUDA_ALLOC_CONF``, and the settings in snapshots."""

from __future__ import annotations

import contextlib
import json
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Value = int | float | bool | tuple[int, ...] | None

#: Number of size intervals: requests from 1 MiB, 2 MiB, ... 32 GiB on have their own number of divisions.
INTERVALS = 16
_ITEM = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")
#: Settings that decide the addresses of buffers, as long as memory suffices.
_OF_PLACES = (
    "large_segment_size_mb",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "roundup_power2_divisions",
)
#: Settings without effect on addresses in device memory.
_WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)


def parse_conf(text: str) -> dict[str, Value]:
    """Parse settings by name from ``key:value,key:[a:b,c:d]``, without those that have no effect here.

    Raises:
        ValueError: naming a key that does not exist or cannot be simulated, or an invalid value.
    """
    values: dict[str, Value] = {}
    rest = "".join(text.split())
    while rest:
        found = _ITEM.match(rest)
        if found is None:
            raise ValueError(f"conf: {rest[:40]!r} is not key:value")
        name, value = found.groups()
        rest = rest[found.end() :]
        if name in _READERS:
            try:
                values[name] = _READERS[name](value)
            except ValueError:
                raise ValueError(f"conf: {name} has no value {value[:40]!r}") from None
        elif name not in _WITHOUT_EFFECT:
            raise ValueError(f"conf: there is no simulated setting {name[:40]!r}")
    return values


def recorded_settings(metadata: Mapping[str, str]) -> dict[str, Value]:
    """Return the address-deciding settings of a recorded allocator from the metadata of a trace.

    Entries that do not follow PyTorch's syntax are ignored.
    """
    values: dict[str, Value] = {}
    with contextlib.suppress(ValueError):
        conf = parse_conf(metadata.get("setting.PYTORCH_CUDA_ALLOC_CONF", ""))
        values = {name: conf[name] for name in _OF_PLACES if name in conf}
    with contextlib.suppress(ValueError, KeyError):
        largest = int(metadata["setting.max_split_size"])  # in bytes; -1 or 2**64 - 1 for none
        values["max_split_size_mb"] = largest >> 20 if 0 < largest < 1 << 50 else None
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        divisions = json.loads(metadata["setting.roundup_power2_divisions"])  # by MiB, as text
        values["roundup_power2_divisions"] = tuple(int(divisions[str(1 << k)]) for k in range(INTERVALS))
    return values


def _flag(value: str) -> bool:
    if value not in ("True", "False"):
        raise ValueError
    return value == "True"


def _native(value: str) -> None:
    if value != "native":
        raise ValueError


def _divisions(value: str) -> int | tuple[int, ...]:
    """Parse one number, or numbers for requests of so many MiB on: ``[256:1,512:2,>:4]``."""
    if not value.startswith("["):
        return int(value)
    result = [0] * INTERVALS
    last = 0
    for at, part in enumerate(value[1:-1].split(",") if value != "[]" else ()):
        start, _, number = part.partition(":")
        if start == ">":
            result[last:] = [int(number)] * (INTERVALS - last)
            continue
        mib = int(start)
        if mib < 1 or mib & (mib - 1):
            raise ValueError
        last = min(mib.bit_length() - 1, INTERVALS - 1)
        if at == 0:
            result[:last] = [int(number)] * last
        result[last] = int(number)
    return tuple(result)


_READERS: dict[str, Callable[[str], Value]] = {
    "backend": _native,
    "expandable_segments": _flag,
    "garbage_collection_threshold": float,
    "large_segment_size_mb": int,
    "max_non_split_rounding_mb": int,
    "max_split_size_mb": int,
    "roundup_power2_divisions": _divisions,
}

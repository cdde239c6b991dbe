"""PyTorch's caching allocator for CUDA devices, with plain and with expandable segments, and its settings."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from solvers import _core
from solvers.simulators.allocator import Native

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Value = int | float | bool | tuple[int, ...] | None

#: Number of size intervals, from 1 MiB, 2 MiB, ... 32 GiB on, each with a number of divisions.
INTERVALS = 16
_ITEM = re.compile(r"([^:,\[\]]+):(\[[^\[\]]*\]|[^:,\[\]]+)(?:,|$)")
#: Settings that determine the addresses of buffers while memory suffices.
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
    """Parse settings from ``key:value,key:[a:b,c:d]``; ignore settings without effect here.

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
    """Return the settings of a recorded allocator that determine addresses, from a trace's metadata.

    Entries that violate PyTorch's syntax are ignored.
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
    """Parse one number, or numbers by least request in MiB: ``[256:1,512:2,>:4]``."""
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


_MIB = 1 << 20
_UNLIMITED = 2**63 - 1


@dataclass(frozen=True)
class PyTorch(Native):
    """Default allocator (c10/cuda/CUDACachingAllocator.cpp, as of PyTorch 2.13).

    Requests are rounded to 512 bytes. Requests up to 1 MiB are served from segments of 2 MiB, requests below
    10 MiB from segments of 20 MiB, others from a separate segment, a multiple of 2 MiB. The smallest
    sufficient free block of the stream and the pool is taken, and split if at least 512 bytes (small) or more
    than 1 MiB remain. A freed block merges with free neighbours. If the device is full, entirely free
    segments are released. A driver call is a cudaMalloc or a cudaFree.

    Private pools of captured graphs and of `MemPool` are modelled as streams. Not modelled: the release of
    such pools with their graphs, callbacks that free memory.

    Attributes:
        conf: text in the syntax of ``PYTORCH_CUDA_ALLOC_CONF``; these settings override the other fields.
        max_split_size_mb: least size in MiB of blocks that are not split; None for no such limit.
        max_non_split_rounding_mb: an unsplit block serves a request that is smaller by less than this number
            of MiB; None for 20.
        roundup_power2_divisions: number of steps between powers of two to which requests are rounded up, 0
            for no rounding; or sixteen numbers, for requests from 1 MiB (and smaller), 2 MiB, ... 32 GiB on.
        garbage_collection_threshold: fraction of the limit above which long unused free segments are
            released; 0 for never. No effect without a limit.
        large_segment_size_mb: size in MiB of the segments for requests from 1 to 10 MiB.
    """

    conf: str = ""
    max_split_size_mb: int | None = None
    max_non_split_rounding_mb: int | None = None
    roundup_power2_divisions: int | tuple[int, ...] = 0
    garbage_collection_threshold: float = 0.0
    large_segment_size_mb: int = 20
    _expandable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.conf, str):
            raise ValueError(f"conf={self.conf!r} is not text as of PYTORCH_CUDA_ALLOC_CONF")
        names = {field.name for field in fields(self)}
        for name, value in parse_conf(self.conf).items():
            if name == "expandable_segments" and value != self._expandable:
                raise ValueError(f"{name}:{value} is the allocator pytorch{'_expandable' if value else ''}")
            if name in names:
                object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        least = self.large_segment_size_mb
        _check_mib("large_segment_size_mb", least, 11)
        for name in ("max_split_size_mb", "max_non_split_rounding_mb"):
            if getattr(self, name) is not None:
                _check_mib(name, getattr(self, name), least)
        threshold = self.garbage_collection_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, int | float) or not 0 <= threshold < 1:
            raise ValueError(f"garbage_collection_threshold={threshold!r} is not in [0, 1)")
        divisions = self._divisions()
        if len(divisions) != INTERVALS:
            raise ValueError(f"roundup_power2_divisions has {len(divisions)} numbers, not {INTERVALS}")
        for value in divisions:
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not 0 <= value <= 1 << 30 or value & (value - 1):
                raise ValueError(f"roundup_power2_divisions: {value!r} is no power of two")

    def _divisions(self) -> list[int]:
        given = self.roundup_power2_divisions
        return list(given) if isinstance(given, list | tuple) else [given] * INTERVALS

    def rules(self) -> _core.PyTorchRules:
        """Return the settings in bytes, for the native code."""
        split, rounding = self.max_split_size_mb, self.max_non_split_rounding_mb
        return _core.PyTorchRules(
            max_split=_UNLIMITED if split is None else split * _MIB,
            max_non_split_rounding=(20 if rounding is None else rounding) * _MIB,
            large_segment=self.large_segment_size_mb * _MIB,
            gc_threshold=self.garbage_collection_threshold,
            divisions=self._divisions(),
        )

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedPyTorch(device, self.rules())


def _check_mib(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 1 << 30:
        raise ValueError(f"{name}={value!r} is not a whole number from {least} to {1 << 30}")


@dataclass(frozen=True)
class PyTorchExpandable(PyTorch):
    """Allocator with ``expandable_segments:True``: one segment per pool and stream, growing by pages.

    A segment has addresses for nine eighths of the device (without a limit: of 1 PiB) and pages of 2 MiB
    (small) or 20 MiB; memory needed beyond the last block is mapped at the end. Pages are released only if
    memory runs out. The garbage collector ignores these segments. A driver call is a page created and mapped
    (cuMemCreate, cuMemMap), or unmapped and released.
    """

    _expandable: ClassVar[bool] = True

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedAllocator:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedPyTorchExpandable(device, self.rules())

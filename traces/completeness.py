"""Coverage of a program's memory history by a recording, and the memory from before the recording.

Readers write into a trace's metadata, for each device: ``history.DEVICE``, and ``live_before.DEVICE`` and
``reserved_before.DEVICE`` in bytes. Code that draws conclusions from a trace calls `completeness` first,
since an unrecorded load may exceed all recorded loads.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces.trace import EventType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from traces.trace import Trace

_DEVICE_FREE = "refused.device_free"
#: Most refused requests whose free memory is stored, since the metadata is one line of text.
_MOST_DEVICE_FREE = 1000


class History(enum.StrEnum):
    """The part of a device's history that a recording holds."""

    WHOLE = "whole"  #: no memory was in use before the first event
    WINDOW = "window"  #: memory was in use, or reserved, before the first event
    ABSENT = "absent"  #: no events, only the state at the end


@dataclass(frozen=True)
class Completeness:
    """The coverage of one device's history by a trace.

    Attributes:
        device: the device's index.
        history: the part of the history that was recorded.
        live_before_bytes: known requested bytes alive before the first event.
        reserved_before_bytes: known bytes of segments held before the first event.
    """

    device: int
    history: History
    live_before_bytes: int
    reserved_before_bytes: int

    @property
    def is_whole(self) -> bool:
        """True if no event of the device is missing."""
        return self.history is History.WHOLE


def completeness(trace: Trace, device: int) -> Completeness:
    """Return the coverage of a device's history by a trace.

    A trace without history metadata is whole, unless buffers were alive before the trace.
    """
    said = trace.metadata
    silent = not any(name.startswith("history.") for name in said)
    before = silent and _number(said.get("alive_before")) > 0
    default = History.WINDOW if before else History.WHOLE
    text = said.get(f"history.{device}", default)
    return Completeness(
        device=device,
        history=History(text) if text in set(History) else default,
        live_before_bytes=_number(said.get(f"live_before.{device}")),
        reserved_before_bytes=_number(said.get(f"reserved_before.{device}")),
    )


def known_before(devices: Mapping[int, tuple[bool, int, int]]) -> dict[str, str]:
    """Return the metadata that `completeness` reads.

    Args:
        devices: for each device whether events exist, and the bytes live and reserved before the first
            event.
    """
    said = {}
    for device, (has_events, live, reserved) in devices.items():
        before = live > 0 or reserved > 0
        history = History.WHOLE if not before else History.WINDOW if has_events else History.ABSENT
        said[f"history.{device}"] = str(history)
        if before:
            said |= {f"live_before.{device}": str(live), f"reserved_before.{device}": str(reserved)}
    return said


def with_device_free(free_bytes: Iterable[int]) -> dict[str, str]:
    """Return the metadata that `device_free` reads: bytes by refused request, in order, -1 where unknown."""
    known = list(free_bytes)[:_MOST_DEVICE_FREE]
    return {_DEVICE_FREE: ",".join(map(str, known))} if any(value >= 0 for value in known) else {}


def device_free(trace: Trace) -> NDArray[np.int64]:
    """Return the bytes that were free on the device at each refused request, int64[k]; -1 where unknown."""
    count = int((trace.kind == EventType.REFUSED).sum())
    free = np.full(count, -1, np.int64)
    for at, text in enumerate(trace.metadata.get(_DEVICE_FREE, "").split(",")[:count]):
        free[at] = _number(text, unknown=-1)
    return free


def _number(text: str | None, unknown: int = 0) -> int:
    """Return a number of at most 18 digits from metadata, or ``unknown`` for any other text."""
    plain = text is not None and text.isascii() and text.isdigit() and len(text) < 19
    return int(text or "") if plain else unknown

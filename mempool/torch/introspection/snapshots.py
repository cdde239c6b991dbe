"""Memory and recent events of a pool in the form of PyTorch's memory snapshots.

A snapshot consists of plain dicts, lists, numbers and text, for PyTorch's viewer. On a device with pages,
each run of pages is a separate segment, as in PyTorch's expandable segments, so that all segments add up to
the reserved bytes. Allocations run without Python, so events have no frames.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mempool import _core

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

_SEGMENT = np.dtype(list(_core.SEGMENT_FIELDS))
_BLOCK = np.dtype(list(_core.BLOCK_FIELDS))
_EVENT = np.dtype(list(_core.EVENT_FIELDS))
_STATES = {"free": "inactive", "live": "active_allocated", "waiting": "active_pending_free"}
#: PyTorch's names for the parts of a mempool event; marks have none.
_ACTIONS = {
    "alloc": ("alloc",),
    "free": ("free_requested", "free_completed"),
    "handover": ("free_requested", "free_completed"),
    "segment_alloc": ("segment_alloc",),
    "segment_free": ("segment_free",),
    "segment_map": ("segment_map",),
    "segment_unmap": ("segment_unmap",),
    "refused": ("oom",),
}
#: PyTorch's id of the default pool; segments of captured graphs have other ids.
_NO_POOL = (0, 0)

Table = dict[str, Any]


def of_device(
    device: int, client: _core.Client, pool: _core.Pool, *, max_entries: int, skip: Collection[str] = ()
) -> tuple[list[Table], list[Table]]:
    """Return segments and trace entries of one device at one moment.

    Args:
        device: index of the device.
        client: the client whose history is read.
        pool: the pool whose memory is read.
        max_entries: number of latest trace entries; 0 for none.
        skip: PyTorch's names of omitted actions.
    """
    segments, blocks, history = _core.snapshot(pool, client if max_entries else None)
    entries = _entries(np.frombuffer(history, _EVENT), skip)
    if max_entries == 0:
        return _segments(device, segments, blocks), []
    return _segments(device, segments, blocks), list(deque(entries, min(max_entries, 2**63 - 1)))


def whole(segments: list[Table], device_traces: list[list[Table]]) -> Table:
    """Return a snapshot of all devices; ``device_traces`` is indexed by device."""
    return {
        "segments": segments,
        "device_traces": device_traces,
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
            "max_split_size": -1,
            "garbage_collection_threshold": 0.0,
            "expandable_segments": False,
            "roundup_power2_divisions": {},
        },
        "external_annotations": [],
    }


def _segments(device: int, packed_segments: bytes, packed_blocks: bytes) -> list[Table]:
    segments = np.frombuffer(packed_segments, _SEGMENT)
    blocks: list[list[Table]] = [[] for _ in segments]
    for address, size, requested, segment, state in np.frombuffer(packed_blocks, _BLOCK).tolist():
        blocks[segment].append(
            {
                "address": address,
                "size": size,
                "requested_size": requested,
                "state": _STATES[_core.BLOCK_STATES[state]],
                "frames": [],
            }
        )
    return [
        {
            "device": device,
            "address": base,
            "total_size": size,
            "allocated_size": _sum(within, "size", "active_allocated"),
            "active_size": _sum(within, "size", "active_allocated", "active_pending_free"),
            "requested_size": _sum(within, "requested_size", "active_allocated"),
            "stream": stream,
            "segment_type": "small" if _core.SEGMENT_KINDS[kind] == "small" else "large",
            "segment_pool_id": tuple(graph),
            "is_expandable": bool(paged),
            "frames": [],
            "blocks": within,
        }
        for (base, size, stream, kind, paged, *graph), within in zip(segments.tolist(), blocks, strict=True)
    ]


def _sum(blocks: list[Table], key: str, *states: str) -> int:
    return sum(block[key] for block in blocks if block["state"] in states)


def _entries(history: np.ndarray[Any, Any], skip: Collection[str]) -> Iterator[Table]:
    epoch_us = (time.time_ns() - time.monotonic_ns()) // 1000
    for _, address, size, time_ns, stream, _, kind in history.tolist():
        for action in _ACTIONS.get(_core.EVENT_KINDS[kind], ()):
            if action in skip:
                continue
            where = {"device_free": 0} if action == "oom" else {"addr": address}  # unknown free bytes
            yield {
                "action": action,
                **where,
                "size": size,
                "stream": stream,
                "time_us": epoch_us + time_ns // 1000,
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": _NO_POOL,
                "frames": [],
            }

"""Accesses of CuPy's arrays joined with the pools of their devices, on addresses without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")

from cupy_platform import Current, FakePlatform, install  # noqa: E402
from pools import simulated  # noqa: E402

import mempool.cupy  # noqa: E402
from traces import EventType  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mempool.cupy import CupyPool


@pytest.fixture
def pool(current: Current) -> Iterator[CupyPool]:
    with install(FakePlatform(current, lambda _: simulated())) as made:
        yield made


def test_buffers_of_two_devices_keep_device_and_stream(pool: CupyPool, current: Current) -> None:
    """Buffers that no access touches are in the trace too."""
    for device in (0, 1):  # a device that was not met before is not recorded
        with current.on(device=device):
            cupy.ndarray((4,), "f4")
    with mempool.cupy.record_arrays() as recorder:
        xp = recorder.module(cupy)
        made = [xp.empty((100,), "f4")]
        with current.on(device=1, stream=7):
            made.append(xp.empty((200,), "f4"))
            recorder.touch(made, write=True)
            cupy.ndarray((300,), "f4")
        pool.step()
        del made
    trace = recorder.trace()
    trace.validate()
    assert trace.metadata["foreign_buffers"] == "0"
    allocs = trace.kind == EventType.ALLOC
    assert sorted(trace.size[allocs].tolist()) == [400, 800, 1200]
    assert dict(zip(trace.size[allocs].tolist(), trace.device[allocs].tolist(), strict=True))[800] == 1
    accesses = (trace.kind == EventType.READ) | (trace.kind == EventType.WRITE)
    assert np.array_equal(trace.stream[accesses], trace.stream[trace.births[accesses]])
    assert trace.stream[accesses].any()
    assert trace.metadata["untouched_buffers"] == "1"
    assert (trace.kind == EventType.MARK).sum() == 1

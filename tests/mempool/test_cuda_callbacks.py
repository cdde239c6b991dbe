"""Pools for frameworks that call Python for each buffer, on a driver without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mempool import UsageError
from mempool.cuda_callbacks import CallbackPool

if TYPE_CHECKING:
    from fake_cuda import FakeCuda

MIB = 1 << 20


def test_allocation_on_a_captured_stream_is_refused_and_the_pool_goes_on(fake: FakeCuda) -> None:
    """The graph would use the memory long after the memory has another owner."""
    stream, side = fake.stream(), fake.stream()
    with CallbackPool(0, driver=fake.driver, name="captured", background=False) as pool:
        before = pool.take(MIB, stream)
        fake.begin_capture(stream)
        fake.fork(stream, side)
        for captured in (stream, side):
            with pytest.raises(UsageError, match="allocate before the capture"):
                pool.take(MIB, captured)
        other = pool.take(MIB)
        pool.give(before, stream)
        assert not fake.is_broken(stream)
        fake.destroy_graph(fake.end_capture(stream))
        for address in (pool.take(MIB, stream), other):
            pool.give(address, 0)

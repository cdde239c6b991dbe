"""Programs of several streams, from the recording to the replay: the plan predicts waits and hits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from pools import run, simulated
from programs import Watched

from mempool import Pool
from solvers import check, peak_load
from solvers.packing.streams import waits

if TYPE_CHECKING:
    from pathlib import Path

KIB = 1 << 10
COMPUTE, COPY = 0, 7


class TwoStreams(Watched):
    """Layers on one stream, with another stream that gathers and scatters buckets between them."""

    copy = COPY

    def iteration(self, _: int) -> None:
        for layer in range(8):
            self.free(self.allocate(256 * KIB, self.copy), self.copy)
            work = [self.allocate((20 + 10 * k + layer) * KIB, COMPUTE) for k in range(6)]
            for address in reversed(work):
                self.free(address, COMPUTE)


@pytest.mark.parametrize("marks", [True, False])
@pytest.mark.parametrize(("wait_bytes", "shares"), [(0, True), ("1GiB", False), ("never", False)])
def test_plan_of_several_streams_predicts_waits_and_misses(
    wait_bytes: int | str, shares: bool, marks: bool
) -> None:
    with Pool(simulated(), background=False, wait_bytes=wait_bytes) as pool:
        program = TwoStreams(pool)
        run(pool, program.iteration, 12, marks=marks)
        assert pool.planned is not None
        plan, buffers = pool.planned.plan, pool.planned.buffers
        check(plan, buffers)
        assert set(buffers.stream.tolist()) == {COMPUTE, COPY}
        apart = sum(peak_load(buffers.select((buffers.stream == s).nonzero()[0])) for s in (COMPUTE, COPY))
        assert (plan.arena_bytes < apart * 0.9) == shares
        expected = waits(plan, buffers)
        assert (expected > 0) == shares
        before, misses = pool.core.stats()["stream_waits"], pool.report().to_dict()["misses"]
        run(pool, program.iteration, 10, marks=marks)
        assert pool.core.stats()["stream_waits"] - before == 10 * expected
        assert pool.report().to_dict()["misses"] == misses


def test_plan_with_shared_addresses_is_explained_where_streams_never_share(tmp_path: Path) -> None:
    """PyTorch's programs may have a use by another stream waited for after the free: see CudaPool."""
    path = tmp_path / "p.plan"
    with Pool(simulated(), background=False, wait_bytes=0) as pool:
        run(pool, TwoStreams(pool).iteration, 12, marks=True)
        pool.save(path)
    with Pool(simulated(), background=False, plan=str(path), wait_bytes="never") as pool:
        run(pool, TwoStreams(pool).iteration, 3, marks=True)
        assert "other_stream: another stream used the memory last" in pool.explain()


def test_saved_plan_of_several_streams_serves_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "p.plan"
    with Pool(simulated(), background=False, wait_bytes=0) as pool:
        run(pool, TwoStreams(pool).iteration, 12, marks=True)
        pool.save(path)
    with Pool(simulated(), background=False, plan=str(path)) as pool:
        program = TwoStreams(pool)
        program.copy = 123
        run(pool, program.iteration, 6, marks=True)
        said = pool.report().to_dict()
        confirming = 6  # the first stream's allocations until the program is known to follow the plan
        assert said["hits"] == 6 * 8 * 7 - confirming
        assert said["misses"] == 0

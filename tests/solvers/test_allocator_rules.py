"""Rules of each simulated allocator, on a few requests whose outcome follows from the source by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from simulations import MIB, check_simulation, event_traces, trace_of

from solvers.simulators import simulate
from traces.trace import EventType

if TYPE_CHECKING:
    from solvers.simulators import Simulation
    from traces.trace import Trace

KIB = 1 << 10
A, F = int(EventType.ALLOC), int(EventType.FREE)


def course(
    allocator: str, steps: list[tuple[int, int, int]], limit_bytes: int | None = None, **parameters: Any
) -> Simulation:
    """Simulate steps of (kind, size or index of the live buffer to free, stream)."""
    simulation = simulate(trace_of(steps), allocator, limit_bytes=limit_bytes, **parameters)
    check_simulation(simulation, limit_bytes)
    return simulation


def offsets(simulation: Simulation) -> list[int]:
    """Return the offsets of successful allocs, from the start of the first segment."""
    address = simulation.address[simulation.address >= 0]
    return (address - simulation.segments.address[0]).tolist()


def test_cupy_splits_every_remainder() -> None:
    """A free 2 KiB segment serves 512 bytes and then 1.5 KiB: no new segment."""
    simulation = course("cupy", [(A, 2048, 0), (F, 0, 0), (A, 1, 0), (A, 1536, 0)])
    assert offsets(simulation) == [0, 0, 512]
    assert simulation.peak_reserved_bytes == 2048


def test_cupy_keeps_streams_apart() -> None:
    """Memory freed by stream 0 is no use to stream 1, whichever stream frees the buffer."""
    simulation = course("cupy", [(A, 2048, 0), (F, 0, 1), (A, 2048, 1)])
    assert simulation.reserved[-1] == 4096


def test_cupy_gives_back_whole_segments_only() -> None:
    """One of two free segments is partly in use, so only the other is returned before the third is taken."""
    steps = [(A, 2048, 0), (A, 2048, 0), (F, 0, 0), (F, 0, 0), (A, 512, 0), (A, 4096, 0)]
    simulation = course("cupy", steps, limit_bytes=6 * KIB)
    assert simulation.reserved.tolist()[-2:] == [4096, 6144]
    assert simulation.driver_calls == 4


def test_cnmem_grows_by_the_request() -> None:
    """A request that finds no free block takes its own size, rounded up to 512; no first block exists."""
    simulation = course("cnmem", [(A, 1000, 0), (A, 1, 0)])
    assert simulation.reserved.tolist() == [1024, 1536]


def test_cnmem_first_block() -> None:
    """Requests come out of the first block, side by side, until the block is full."""
    steps = [(A, 200 * MIB, 0), (A, 56 * MIB, 0), (A, 1, 0)]
    simulation = course("cnmem_first_block", steps)
    assert simulation.reserved.tolist() == [256 * MIB, 256 * MIB, 256 * MIB + 512]
    assert simulation.address[1] - simulation.address[0] == 200 * MIB


def test_cnmem_first_block_larger_than_the_device_fails_every_request() -> None:
    """A device with less memory fails `cnmemInit`, and every later request."""
    simulation = course("cnmem_first_block", [(A, 1, 0)], limit_bytes=255 * MIB)
    assert (simulation.failed_at, simulation.peak_reserved_bytes) == (0, 0)


def test_cnmem_streams_keep_memory_of_the_first_block() -> None:
    """A stream takes memory from the first block, and the default stream never gets that memory again."""
    steps = [(A, MIB, 1), (F, 0, 1), (A, MIB, 0), (A, MIB, 1)]
    simulation = course("cnmem_first_block", steps, first_block_bytes=2 * MIB)
    assert offsets(simulation) == [0, MIB, 0]


def test_cnmem_steals_from_another_stream_when_the_device_is_full() -> None:
    """Stream 0 takes half of the block that stream 1 has freed."""
    steps = [(A, 2 * MIB, 1), (F, 0, 1), (A, MIB, 0), (A, MIB, 2)]
    simulation = course("cnmem", steps, limit_bytes=2 * MIB)
    assert offsets(simulation) == [0, 0, MIB]
    assert simulation.failed_at is None


def test_cnmem_block_never_merges_after_a_theft() -> None:
    """The remainder is a head.

    Though stream 1 steals the other half back and frees both, the halves stay apart.
    """
    steps = [(A, 2 * MIB, 1), (F, 0, 1), (A, MIB, 2), (F, 0, 2)]
    steps += [(A, MIB, 1), (A, MIB, 1), (F, 0, 1), (F, 0, 1), (A, 2 * MIB, 1)]
    simulation = course("cnmem", steps, limit_bytes=2 * MIB)
    assert simulation.failed_at == 8


@pytest.mark.parametrize("allocator", ["cnmem", "rmm_pool"])
def test_adjacent_segments_do_not_merge(allocator: str) -> None:
    """A segment begins with a head, which merges with no lower block, even at adjacent addresses."""
    steps = [(A, 2 * MIB, 0), (A, 2 * MIB, 0), (F, 1, 0), (F, 0, 0), (A, 4 * MIB, 0)]
    simulation = course(allocator, steps)
    assert simulation.address[1] - simulation.address[0] == 2 * MIB
    assert simulation.reserved[-1] == 8 * MIB


def test_bfc_splits_blocks_of_at_least_twice_the_request() -> None:
    """1 MiB is split off 2 MiB; 1 MiB + 256 is not, and the buffer gets the whole block."""
    exact = course("bfc", [(A, MIB, 0)])
    assert exact.live[0] == MIB
    whole = course("bfc", [(A, MIB + 1, 0)])
    assert whole.live[0] == 2 * MIB


def test_bfc_never_wastes_128_mib() -> None:
    """A block of 512 MiB is split for 384 MiB, where 128 MiB are left, and not for more."""
    for size, live in ((384 * MIB, 384 * MIB), (384 * MIB + 1, 512 * MIB)):
        assert course("bfc", [(A, size, 0)], first_region_bytes=512 * MIB).live[0] == live


def test_bfc_regions_double() -> None:
    """2 MiB, then 4, then 8, doubled until large enough, and then not doubled once more."""
    simulation = course("bfc", [(A, 2 * MIB, 0), (A, 4 * MIB, 0), (A, 17 * MIB, 0), (A, 32 * MIB, 0)])
    assert simulation.segments.size.tolist() == [2 * MIB, 4 * MIB, 32 * MIB, 32 * MIB]


def test_bfc_gives_free_regions_back() -> None:
    """2 MiB are free and 6 MiB are left: a request of 7 MiB fits only once the region has gone."""
    steps = [(A, 2 * MIB, 0), (F, 0, 0), (A, 7 * MIB, 0)]
    assert course("bfc", steps, limit_bytes=8 * MIB).failed_at is None
    assert course("bfc", steps, limit_bytes=8 * MIB, garbage_collection=False).failed_at == 2


def test_bfc_without_growth_takes_the_whole_device() -> None:
    """The first request takes all memory; without a limit the device size is unknown."""
    simulation = course("bfc", [(A, 1, 0)], limit_bytes=1 << 30, allow_growth=False)
    assert simulation.peak_reserved_bytes == 1 << 30
    with pytest.raises(ValueError, match="give it a limit"):
        course("bfc", [(A, 1, 0)], allow_growth=False)


def test_rmm_pool_begins_with_half_of_the_device() -> None:
    """The default of RMM's Python interface; without a limit the pool begins empty."""
    assert course("rmm_pool", [(A, 1, 0)], limit_bytes=1 << 30).peak_reserved_bytes == 1 << 29
    assert course("rmm_pool", [(A, 1, 0)]).peak_reserved_bytes == 256


def test_rmm_pool_doubles() -> None:
    """Without a maximum the pool doubles, or grows by the request if larger."""
    simulation = course("rmm_pool", [(A, MIB, 0), (A, 3 * MIB, 0), (A, 256, 0)])
    assert simulation.reserved.tolist() == [MIB, 4 * MIB, 8 * MIB]


def test_rmm_pool_with_a_maximum_takes_half_of_the_remainder() -> None:
    """The maximum is 8 MiB: 1 at first, then half of the remaining 7."""
    simulation = course(
        "rmm_pool", [(A, MIB, 0), (A, 256, 0)], initial_pool_bytes=MIB, maximum_pool_bytes=8 * MIB
    )
    assert simulation.reserved.tolist() == [MIB, MIB + 7 * MIB // 2]


def test_rmm_pool_takes_less_when_doubling_fails() -> None:
    """2 of 3 MiB are held: the pool asks for 2, then for 1, and gets 1."""
    simulation = course("rmm_pool", [(A, 2 * MIB, 0), (A, 256, 0)], 3 * MIB, initial_pool_bytes=0)
    assert simulation.reserved.tolist() == [2 * MIB, 3 * MIB]


def test_rmm_pool_merges_the_free_lists_of_other_streams() -> None:
    """1 MiB freed on each of two streams is 2 MiB after merging, so the pool does not grow."""
    steps = [(A, 2 * MIB, 0), (F, 0, 0), (A, MIB, 0), (A, MIB, 0), (F, 0, 1), (F, 0, 2), (A, 2 * MIB, 3)]
    assert course("rmm_pool", steps).peak_reserved_bytes == 2 * MIB


def test_rmm_pool_at_its_maximum_gives_free_segments_back() -> None:
    """Two free segments of 2 MiB cannot serve 4 MiB until both are given back."""
    steps = [(A, 2 * MIB, 0), (A, 2 * MIB, 0), (F, 0, 0), (F, 0, 0), (A, 4 * MIB, 0)]
    simulation = course("rmm_pool", steps, initial_pool_bytes=0, maximum_pool_bytes=4 * MIB)
    assert simulation.failed_at is None
    assert simulation.driver_calls == 5


def test_rmm_bins_are_taken_at_once() -> None:
    """128 blocks of 256 KiB to 4 MiB are 992 MiB, and one byte takes a block.

    Larger requests go to the pool.
    """
    simulation = course("rmm_binning", [(A, 1, 0), (A, 4 * MIB + 1, 0)])
    assert simulation.reserved[0] == 992 * MIB
    assert simulation.live.tolist() == [256 * KIB, 256 * KIB + 4 * MIB + 256]


def test_rmm_bins_reuse_the_block_free_for_longest() -> None:
    """The free blocks of a bin are a queue: the second block follows, not the block just freed."""
    simulation = course("rmm_binning", [(A, 1, 0), (F, 0, 0), (A, 1, 0)])
    assert offsets(simulation) == [0, 256 * KIB]


def test_rmm_arena_gives_each_stream_a_superblock() -> None:
    """Small requests of two streams lie 1 MiB apart; a large request is cut from the next superblock."""
    steps = [(A, 256, 0), (A, 256, 1), (A, 256, 0), (A, MIB + 1, 0)]
    simulation = course("rmm_arena", steps, arena_bytes=8 * MIB)
    assert offsets(simulation) == [0, MIB, 256, 2 * MIB]


def test_rmm_arena_takes_superblocks_back_before_failing() -> None:
    """Two streams own both free 2 MiB superblocks: a large request needs them together."""
    steps = [(A, MIB, 0), (A, MIB, 1), (F, 0, 0), (F, 0, 1), (A, 2 * MIB, 0)]
    simulation = course("rmm_arena", steps, arena_bytes=2 * MIB)
    assert simulation.failed_at is None
    assert offsets(simulation)[-1] == 0


def test_rmm_arena_never_grows() -> None:
    """The arena is half of the device, and a request that does not fit fails."""
    simulation = course("rmm_arena", [(A, 3 * MIB, 0), (A, 2 * MIB, 0)], limit_bytes=8 * MIB)
    assert simulation.reserved.tolist() == [4 * MIB] * 2
    assert simulation.failed_at == 1


@settings(max_examples=40, deadline=None)
@given(trace=event_traces())
def test_rmm_arena_without_a_limit_is_as_large_as_necessary(trace: Trace) -> None:
    """An arena of the reported peak size serves the same requests at the same addresses."""
    free = simulate(trace, "rmm_arena")
    if len(trace):
        tight = simulate(trace, "rmm_arena", arena_bytes=free.peak_reserved_bytes)
        assert (tight.address == free.address).all()
        assert (tight.reserved == free.reserved).all()
        assert tight.segments.size.tolist() == free.segments.size.tolist()


def test_buddies_are_powers_of_two() -> None:
    """513 bytes take 1 KiB; halves of 2 MiB lie at 1 KiB, 2 KiB, 4 KiB, and the smallest is taken next."""
    simulation = course("buddy", [(A, 513, 0), (A, 1, 0), (A, 1024, 0)])
    assert offsets(simulation) == [0, 1024, 2048]
    assert simulation.live.tolist() == [1024, 1536, 2560]


def test_buddies_merge() -> None:
    """A region that is free as a whole is one block again; neighbours that are not buddies stay two."""
    steps = [(A, MIB, 0), (A, MIB, 0), (F, 0, 0), (F, 0, 0), (A, 2 * MIB, 0)]
    assert course("buddy", steps).peak_reserved_bytes == 2 * MIB
    quarters = [(A, MIB // 2, 0)] * 4
    middle = [*quarters, (F, 1, 0), (F, 1, 0), (A, MIB, 0)]  # the second and third of four
    assert course("buddy", middle).peak_reserved_bytes == 4 * MIB


@pytest.mark.parametrize(
    ("allocator", "parameters", "what"),
    [
        ("cnmem_first_block", {"first_block_bytes": 0}, "first_block_bytes=0 is not a whole number from 1"),
        ("bfc", {"first_region_bytes": -1}, "first_region_bytes=-1"),
        ("bfc", {"max_slack_bytes": 1.5}, "max_slack_bytes=1.5"),
        ("buddy", {"min_block_bytes": 3}, "min_block_bytes=3 is not a power of two"),
        ("rmm_pool", {"initial_pool_bytes": 512, "maximum_pool_bytes": 256}, "more than maximum_pool_bytes"),
        ("rmm_arena", {"arena_bytes": MIB - 1}, "arena_bytes=1048575"),
        ("rmm_binning", {"min_size_exponent": 20, "max_size_exponent": 19}, "max_size_exponent=19"),
        ("rmm_binning", {"blocks_at_once": True}, "blocks_at_once=True"),
    ],
)
def test_settings_out_of_range_are_named(allocator: str, parameters: dict[str, Any], what: str) -> None:
    """The error lists the valid values."""
    with pytest.raises(ValueError, match=what):
        simulate(trace_of([(A, 1, 0)]), allocator, **parameters)

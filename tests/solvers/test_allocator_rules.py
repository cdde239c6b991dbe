"""The rules of each simulated allocator, on a few requests whose outcome follows from its source by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from simulations import MIB, check_simulation, event_traces, trace_of

from solvers.simulators import simulate
from traces.trace import Kind

if TYPE_CHECKING:
    from solvers.simulators import Simulation
    from traces.trace import Trace

KIB = 1 << 10
A, F = int(Kind.ALLOC), int(Kind.FREE)


def course(
    allocator: str, steps: list[tuple[int, int, int]], limit_bytes: int | None = None, **parameters: Any
) -> Simulation:
    """Of (kind, size or which of the living is freed, stream)."""
    simulation = simulate(trace_of(steps), allocator, limit_bytes=limit_bytes, **parameters)
    check_simulation(simulation, limit_bytes)
    return simulation


def offsets(simulation: Simulation) -> list[int]:
    """Of allocs that did not fail, from the first segment's beginning."""
    address = simulation.address[simulation.address >= 0]
    return (address - simulation.segments.address[0]).tolist()


def test_cupy_splits_whatever_is_left() -> None:
    """A free segment of 2 KiB serves 512 bytes, and the rest of it 1.5 KiB: nothing new is taken."""
    simulation = course("cupy", [(A, 2048, 0), (F, 0, 0), (A, 1, 0), (A, 1536, 0)])
    assert offsets(simulation) == [0, 0, 512]
    assert simulation.peak_reserved_bytes == 2048


def test_cupy_keeps_streams_apart() -> None:
    """What stream 0 has freed is no use to stream 1, whoever frees it."""
    simulation = course("cupy", [(A, 2048, 0), (F, 0, 1), (A, 2048, 1)])
    assert simulation.reserved[-1] == 4096


def test_cupy_gives_back_only_whole_segments() -> None:
    """Of two free segments one is in part in use, so only the other goes before the third is taken."""
    steps = [(A, 2048, 0), (A, 2048, 0), (F, 0, 0), (F, 0, 0), (A, 512, 0), (A, 4096, 0)]
    simulation = course("cupy", steps, limit_bytes=6 * KIB)
    assert simulation.reserved.tolist()[-2:] == [4096, 6144]
    assert simulation.driver_calls == 4


def test_cnmem_grows_by_the_request() -> None:
    """Without a first block each request that finds nothing takes its own size, rounded up to 512."""
    simulation = course("cnmem", [(A, 1000, 0), (A, 1, 0)])
    assert simulation.reserved.tolist() == [1024, 1536]


def test_cnmem_first_block() -> None:
    """Requests come out of the first block, side by side, until it is full."""
    steps = [(A, 200 * MIB, 0), (A, 56 * MIB, 0), (A, 1, 0)]
    simulation = course("cnmem_first_block", steps)
    assert simulation.reserved.tolist() == [256 * MIB, 256 * MIB, 256 * MIB + 512]
    assert simulation.address[1] - simulation.address[0] == 200 * MIB


def test_cnmem_without_its_first_block() -> None:
    """Where the device has less, `cnmemInit` fails, and so does all that follows."""
    simulation = course("cnmem_first_block", [(A, 1, 0)], limit_bytes=255 * MIB)
    assert (simulation.failed_at, simulation.peak_reserved_bytes) == (0, 0)


def test_cnmem_streams_keep_what_they_took() -> None:
    """A stream takes what it needs from the first block, and the default stream never sees that again."""
    steps = [(A, MIB, 1), (F, 0, 1), (A, MIB, 0), (A, MIB, 1)]
    simulation = course("cnmem_first_block", steps, first_block_bytes=2 * MIB)
    assert offsets(simulation) == [0, MIB, 0]


def test_cnmem_steals_at_last() -> None:
    """When the device has no more, stream 0 takes half of the block that stream 1 has freed."""
    steps = [(A, 2 * MIB, 1), (F, 0, 1), (A, MIB, 0), (A, MIB, 2)]
    simulation = course("cnmem", steps, limit_bytes=2 * MIB)
    assert offsets(simulation) == [0, 0, MIB]
    assert simulation.failed_at is None


def test_what_cnmem_stole_from_never_becomes_whole() -> None:
    """The rest is a head: though stream 1 steals the other half back and frees both, they stay halves."""
    steps = [(A, 2 * MIB, 1), (F, 0, 1), (A, MIB, 2), (F, 0, 2)]
    steps += [(A, MIB, 1), (A, MIB, 1), (F, 0, 1), (F, 0, 1), (A, 2 * MIB, 1)]
    simulation = course("cnmem", steps, limit_bytes=2 * MIB)
    assert simulation.failed_at == 8


@pytest.mark.parametrize("allocator", ["cnmem", "rmm_pool"])
def test_segments_that_touch_stay_two(allocator: str) -> None:
    """A segment begins with a head, which merges with nothing below, though the addresses go on."""
    steps = [(A, 2 * MIB, 0), (A, 2 * MIB, 0), (F, 1, 0), (F, 0, 0), (A, 4 * MIB, 0)]
    simulation = course(allocator, steps)
    assert simulation.address[1] - simulation.address[0] == 2 * MIB
    assert simulation.reserved[-1] == 8 * MIB


def test_bfc_splits_what_is_twice_as_large() -> None:
    """Of 2 MiB, 1 MiB is split off; 1 MiB + 256 is not, and the buffer has all of it."""
    exact = course("bfc", [(A, MIB, 0)])
    assert exact.live[0] == MIB
    whole = course("bfc", [(A, MIB + 1, 0)])
    assert whole.live[0] == 2 * MIB


def test_bfc_never_wastes_128_mib() -> None:
    """A block of 512 MiB is split for 384 MiB, where 128 MiB are left, and not for more."""
    for size, live in ((384 * MIB, 384 * MIB), (384 * MIB + 1, 512 * MIB)):
        assert course("bfc", [(A, size, 0)], first_region_bytes=512 * MIB).live[0] == live


def test_bfc_regions_double() -> None:
    """2 MiB, then 4, then 8, which is doubled until it is enough, and then not doubled once more."""
    simulation = course("bfc", [(A, 2 * MIB, 0), (A, 4 * MIB, 0), (A, 17 * MIB, 0), (A, 32 * MIB, 0)])
    assert simulation.segments.size.tolist() == [2 * MIB, 4 * MIB, 32 * MIB, 32 * MIB]


def test_bfc_gives_free_regions_back() -> None:
    """2 MiB are free and 6 MiB are left: a request of 7 MiB fits only once the region has gone."""
    steps = [(A, 2 * MIB, 0), (F, 0, 0), (A, 7 * MIB, 0)]
    assert course("bfc", steps, limit_bytes=8 * MIB).failed_at is None
    assert course("bfc", steps, limit_bytes=8 * MIB, garbage_collection=False).failed_at == 2


def test_bfc_without_growth_takes_the_device() -> None:
    """The first request takes all that there is; without a limit there is no saying what that is."""
    simulation = course("bfc", [(A, 1, 0)], limit_bytes=1 << 30, allow_growth=False)
    assert simulation.peak_reserved_bytes == 1 << 30
    with pytest.raises(ValueError, match="give it a limit"):
        course("bfc", [(A, 1, 0)], allow_growth=False)


def test_rmm_pool_begins_with_half_of_the_device() -> None:
    """As RMM's Python has it; without a limit with nothing."""
    assert course("rmm_pool", [(A, 1, 0)], limit_bytes=1 << 30).peak_reserved_bytes == 1 << 29
    assert course("rmm_pool", [(A, 1, 0)]).peak_reserved_bytes == 256


def test_rmm_pool_doubles() -> None:
    """Without a maximum it grows by its own size, or by the request if that is more."""
    simulation = course("rmm_pool", [(A, MIB, 0), (A, 3 * MIB, 0), (A, 256, 0)])
    assert simulation.reserved.tolist() == [MIB, 4 * MIB, 8 * MIB]


def test_rmm_pool_with_a_maximum_takes_half_of_the_rest() -> None:
    """Of 8 MiB: 1 at first, then half of 7, then half of what is left."""
    simulation = course(
        "rmm_pool", [(A, MIB, 0), (A, 256, 0)], initial_pool_bytes=MIB, maximum_pool_bytes=8 * MIB
    )
    assert simulation.reserved.tolist() == [MIB, MIB + 7 * MIB // 2]


def test_rmm_pool_takes_less_where_it_cannot_double() -> None:
    """Of 3 MiB, 2 are held: it asks for 2, then for 1, and has that."""
    simulation = course("rmm_pool", [(A, 2 * MIB, 0), (A, 256, 0)], 3 * MIB, initial_pool_bytes=0)
    assert simulation.reserved.tolist() == [2 * MIB, 3 * MIB]


def test_rmm_pool_merges_other_streams_lists() -> None:
    """1 MiB freed on each of two streams is 2 MiB once the lists are one, and nothing more is taken."""
    steps = [(A, 2 * MIB, 0), (F, 0, 0), (A, MIB, 0), (A, MIB, 0), (F, 0, 1), (F, 0, 2), (A, 2 * MIB, 3)]
    assert course("rmm_pool", steps).peak_reserved_bytes == 2 * MIB


def test_rmm_pool_at_its_maximum_gives_free_segments_back() -> None:
    """Two free segments of 2 MiB are no room for 4, until both are given back."""
    steps = [(A, 2 * MIB, 0), (A, 2 * MIB, 0), (F, 0, 0), (F, 0, 0), (A, 4 * MIB, 0)]
    simulation = course("rmm_pool", steps, initial_pool_bytes=0, maximum_pool_bytes=4 * MIB)
    assert simulation.failed_at is None
    assert simulation.driver_calls == 5


def test_rmm_bins_are_taken_at_once() -> None:
    """128 blocks of 256 KiB to 4 MiB are 992 MiB, and a byte takes one; what is larger is the pool's."""
    simulation = course("rmm_binning", [(A, 1, 0), (A, 4 * MIB + 1, 0)])
    assert simulation.reserved[0] == 992 * MIB
    assert simulation.live.tolist() == [256 * KIB, 256 * KIB + 4 * MIB + 256]


def test_rmm_bins_give_the_block_that_was_free_for_longest() -> None:
    """The free blocks of a bin are a queue: the second block comes next, not the one just freed."""
    simulation = course("rmm_binning", [(A, 1, 0), (F, 0, 0), (A, 1, 0)])
    assert offsets(simulation) == [0, 256 * KIB]


def test_rmm_arena_gives_each_stream_a_superblock() -> None:
    """Small requests of two streams lie 1 MiB apart; a large one is cut from what comes then."""
    steps = [(A, 256, 0), (A, 256, 1), (A, 256, 0), (A, MIB + 1, 0)]
    simulation = course("rmm_arena", steps, arena_bytes=8 * MIB)
    assert offsets(simulation) == [0, MIB, 256, 2 * MIB]


def test_rmm_arena_takes_superblocks_back_before_it_fails() -> None:
    """Both of 2 MiB are streams', and free: together they are what a large request needs."""
    steps = [(A, MIB, 0), (A, MIB, 1), (F, 0, 0), (F, 0, 1), (A, 2 * MIB, 0)]
    simulation = course("rmm_arena", steps, arena_bytes=2 * MIB)
    assert simulation.failed_at is None
    assert offsets(simulation)[-1] == 0


def test_rmm_arena_never_grows() -> None:
    """It is half of the device, and what does not fit fails."""
    simulation = course("rmm_arena", [(A, 3 * MIB, 0), (A, 2 * MIB, 0)], limit_bytes=8 * MIB)
    assert simulation.reserved.tolist() == [4 * MIB] * 2
    assert simulation.failed_at == 1


@settings(max_examples=40, deadline=None)
@given(trace=event_traces())
def test_rmm_arena_without_a_limit_is_as_large_as_it_needs(trace: Trace) -> None:
    """With an arena of the size that it then tells, all is served at the same addresses."""
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
    """When all of a region is free it is one block again; neighbours that are not buddies stay two."""
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
    """With the values that are possible."""
    with pytest.raises(ValueError, match=what):
        simulate(trace_of([(A, 1, 0)]), allocator, **parameters)

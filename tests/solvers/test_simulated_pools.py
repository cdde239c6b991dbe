"""Simulated pools in native code against slow models of their sources, event by event."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from allocator_models import BfcModel, CnmemModel, CupyModel, Driver, Model, RmmPoolModel, play
from arena_models import BuddyModel, RmmArenaModel, RmmBinningModel
from hypothesis import given, settings
from hypothesis import strategies as st
from simulations import MIB, event_traces, random_trace, trace_of

from solvers.simulators import simulate

if TYPE_CHECKING:
    from collections.abc import Callable

    from traces.trace import Trace

    Make = Callable[[Driver], Model]

#: Name, settings, and the model with the same.
CASES: list[tuple[str, dict[str, Any], Make]] = [
    ("cupy", {}, CupyModel),
    ("cnmem", {}, lambda driver: CnmemModel(driver, 0, grows=True)),
    (
        "cnmem_first_block",
        {"first_block_bytes": 20 * MIB + 1},
        lambda driver: CnmemModel(driver, 20 * MIB + 1, grows=True),
    ),
    (
        "cnmem_first_block",
        {"first_block_bytes": 40 * MIB, "grows": False},
        lambda driver: CnmemModel(driver, 40 * MIB, grows=False),
    ),
    ("bfc", {}, lambda driver: BfcModel(driver, 2 * MIB, 128 * MIB, collects=True)),
    (
        "bfc",
        {"garbage_collection": False, "first_region_bytes": 1000, "max_slack_bytes": 5000},
        lambda driver: BfcModel(driver, 1000, 5000, collects=False),
    ),
    ("rmm_pool", {"initial_pool_bytes": 0}, lambda driver: RmmPoolModel(driver, 0, None)),
    (
        "rmm_pool",
        {"initial_pool_bytes": 10 * MIB, "maximum_pool_bytes": 40 * MIB},
        lambda driver: RmmPoolModel(driver, 10 * MIB, 40 * MIB),
    ),
    ("rmm_arena", {"arena_bytes": 24 * MIB}, lambda driver: RmmArenaModel(driver, 24 * MIB)),
    ("rmm_arena", {"arena_bytes": 2 * MIB + 300}, lambda driver: RmmArenaModel(driver, 2 * MIB + 256)),
    (
        "rmm_binning",
        {"min_size_exponent": 9, "max_size_exponent": 12, "blocks_at_once": 3, "initial_pool_bytes": 0},
        lambda driver: RmmBinningModel(driver, [512, 1024, 2048, 4096], 3, 0),
    ),
    (
        "rmm_binning",
        {"min_size_exponent": 18, "max_size_exponent": 20, "blocks_at_once": 2, "initial_pool_bytes": MIB},
        lambda driver: RmmBinningModel(driver, [MIB // 4, MIB // 2, MIB], 2, MIB),
    ),
    ("buddy", {}, lambda driver: BuddyModel(driver, 512, 2 * MIB)),
    (
        "buddy",
        {"min_block_bytes": 1, "region_bytes": 4 * MIB},
        lambda driver: BuddyModel(driver, 1, 4 * MIB),
    ),
]
cases = pytest.mark.parametrize(
    ("allocator", "parameters", "make"), CASES, ids=[f"{case[0]}-{k}" for k, case in enumerate(CASES)]
)


def agree(trace: Trace, allocator: str, parameters: dict[str, Any], make: Make, limit: int) -> int | None:
    """Assert that pool and model agree at each event; return the first failed alloc, or None."""
    driver = Driver(limit)
    address, live, reserved, failed_at = play(trace, driver, make(driver))
    simulation = simulate(trace, allocator, limit_bytes=limit, **parameters)
    assert simulation.address.tolist() == address
    assert simulation.live.tolist() == live
    assert simulation.reserved.tolist() == reserved
    assert simulation.failed_at == failed_at
    held = simulation.segments.end == len(trace)
    if len(trace):
        assert set(simulation.segments.address[held].tolist()) == set(driver.held)
    return failed_at


@cases
@settings(max_examples=60, deadline=None)
@given(trace=event_traces(), limit=st.sampled_from([1 << 50, 64 * MIB, 41 * MIB, 24 * MIB, 3 * MIB, 512, 0]))
def test_native_pool_equals_the_model(
    allocator: str, parameters: dict[str, Any], make: Make, trace: Trace, limit: int
) -> None:
    agree(trace, allocator, parameters, make, limit)


@cases
def test_native_pool_equals_the_model_where_memory_is_short(
    allocator: str, parameters: dict[str, Any], make: Make
) -> None:
    """Long traces, most of which fail somewhere: both take the same steps against the failure."""
    failed = 0
    for seed in range(12):
        trace = random_trace(seed, 500, largest=6 * MIB)
        if seed % 2:  # segments that touch, as those of whole pages do
            trace = dataclasses.replace(trace, size=-(-trace.size // (2 * MIB)) * 2 * MIB)
        limit = int(trace.load().max()) * (9 + seed % 3) // 10
        failed += agree(trace, allocator, parameters, make, limit) is not None
    assert failed


A, F, ANY = 0, 1, 1 << 50
#: An index of `CASES`, a limit, and steps rare in random traces: (A, bytes, stream), (F, which, stream)
CORNERS = {
    "segments in use stay": (0, 6144, [(A, 2048, 0)] * 2 + [(F, 0, 0)] * 2 + [(A, 512, 0), (A, 4096, 0)]),
    "stolen halves stay apart": (
        1,
        2 * MIB,
        [
            (A, 2 * MIB, 1),
            (F, 0, 1),
            (A, MIB, 2),
            (F, 0, 2),
            *[(A, MIB, 1)] * 2,
            *[(F, 0, 1)] * 2,
            (A, 2 * MIB, 1),
        ],
    ),
    "adjacent segments stay apart": (1, ANY, [(A, MIB, 0)] * 2 + [(F, 1, 0), (F, 0, 0), (A, 2 * MIB, 0)]),
    "lists of streams merge": (
        6,
        ANY,
        [(A, 2 * MIB, 0), (F, 0, 0), (A, MIB, 0), (A, MIB, 0), (F, 0, 1), (F, 0, 2), (A, 2 * MIB, 3)],
    ),
    "superblocks come back": (9, ANY, [(A, MIB, 0), (A, MIB, 1), (F, 0, 0), (F, 0, 1), (A, 2 * MIB, 0)]),
    "neighbours are no buddies": (12, ANY, [(A, MIB // 2, 0)] * 4 + [(F, 1, 0)] * 2 + [(A, MIB, 0)]),
}


@pytest.mark.parametrize("name", CORNERS)
def test_native_pool_equals_the_model_in_corners(name: str) -> None:
    case, limit, steps = CORNERS[name]
    agree(trace_of(steps), *CASES[case], limit)


@pytest.mark.parametrize(
    ("allocator", "limit", "reserved"),
    [
        ("cnmem_first_block", None, 256 * MIB),
        ("bfc", None, 2 * MIB),
        ("rmm_pool", None, 256),
        ("rmm_pool", 1 << 30, 1 << 29),
        ("rmm_binning", None, 992 * MIB),
        ("rmm_arena", 8 * MIB, 4 * MIB),
        ("buddy", None, 2 * MIB),
    ],
)
def test_defaults_are_the_librarys_own(allocator: str, limit: int | None, reserved: int) -> None:
    """Half of the device where the library takes it, and 128 blocks for each of the bins of RMM."""
    first = simulate(trace_of([(0, 1, 0)]), allocator, limit_bytes=limit)
    assert first.peak_reserved_bytes == reserved


def test_bfc_without_growth_takes_the_whole_device() -> None:
    trace = trace_of([(0, 1, 0)])
    whole = simulate(trace, "bfc", limit_bytes=1 << 30, allow_growth=False)
    assert whole.peak_reserved_bytes == 1 << 30
    with pytest.raises(ValueError, match="give it a limit"):
        simulate(trace, "bfc", allow_growth=False)


@settings(max_examples=40, deadline=None)
@given(trace=event_traces())
def test_rmm_arena_without_a_limit_is_as_large_as_necessary(trace: Trace) -> None:
    free = simulate(trace, "rmm_arena")
    if len(trace):
        tight = simulate(trace, "rmm_arena", arena_bytes=free.peak_reserved_bytes)
        assert (tight.address == free.address).all()
        assert (tight.reserved == free.reserved).all()
        assert tight.segments.size.tolist() == free.segments.size.tolist()


@pytest.mark.parametrize(
    ("allocator", "parameters", "reason"),
    [
        ("cnmem_first_block", {"first_block_bytes": 0}, "first_block_bytes=0 is not a whole number from 1"),
        ("buddy", {"min_block_bytes": 3}, "min_block_bytes=3 is not a power of two"),
        ("rmm_pool", {"initial_pool_bytes": 512, "maximum_pool_bytes": 256}, "more than maximum_pool_bytes"),
        ("rmm_arena", {"arena_bytes": MIB - 1}, "arena_bytes=1048575"),
        ("rmm_binning", {"min_size_exponent": 20, "max_size_exponent": 19}, "max_size_exponent=19"),
    ],
)
def test_settings_out_of_range_are_named(allocator: str, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        simulate(trace_of([(0, 1, 0)]), allocator, **parameters)


def test_cupys_own_pool_equals_the_model(tmp_path: Path) -> None:
    if importlib.util.find_spec("cupy_backends") is None:
        pytest.skip("CuPy is not installed")
    judge = Path(__file__).parents[1] / "support" / "cupy_judge.py"
    ran = subprocess.run(
        [sys.executable, str(judge), "6"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert ran.returncode == 0, ran.stderr
    unlimited, short, limited = map(int, ran.stdout.split())
    assert unlimited == 0
    assert short
    assert limited

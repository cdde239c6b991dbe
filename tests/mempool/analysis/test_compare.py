"""Comparisons of allocators: rows, settings, and files in processes of their own."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest
from files_that_kill import size_or_death
from recordings import MIB, random_trace

from mempool.analysis.compare import RECORDED, AllocatorSpec, Row, compare, parse_allocator
from mempool.analysis.compare_many import map_files
from mempool.simulate import simulate
from traces import EventType, Trace


def test_comparison_has_a_row_for_each_device_and_allocator() -> None:
    one = random_trace(1, 600)
    two = Trace.of(
        np.tile(one.kind, 2),
        np.concatenate([one.buffer, np.where(one.buffer < 0, -1, one.buffer + 10**6)]),
        np.tile(one.size, 2),
        device=np.repeat([0, 3], len(one)),
    )
    rows = list(
        compare(two, [AllocatorSpec("first_fit"), AllocatorSpec("best_fit", {"growth_bytes": 4 * MIB})])
    )
    assert [(row.device, row.allocator) for row in rows] == [
        (device, name) for device in (0, 3) for name in ("first_fit", "best_fit")
    ]
    made = simulate(two.on_device(3), "best_fit", growth_bytes=4 * MIB)
    assert rows[3].peak_reserved_bytes == made.peak_reserved_bytes == rows[1].peak_reserved_bytes
    assert rows[3].settings == {"growth_bytes": 4 * MIB}
    assert {row.fits for row in rows} == {None}
    for row in compare(one):
        assert row.internal_fragmentation + row.external_fragmentation == pytest.approx(row.fragmentation)
        assert row.peak_load_bytes == one.load().max() <= row.peak_live_bytes <= row.peak_reserved_bytes
        assert row.largest_free_bytes <= row.peak_reserved_bytes


def test_failing_row_names_the_event_the_request_and_the_necessary_bytes() -> None:
    trace = Trace.of(
        [EventType.ALLOC] * 3, [0, 1, 2], [MIB, 2 * MIB, 4 * MIB], operation=[-1, 0, 1], names=["mm", "add"]
    )
    [row] = compare(trace, [AllocatorSpec("first_fit")], limit_bytes=4 * MIB)
    assert row.fits is False
    assert row.failed_at is not None
    assert (row.failed_at.event, row.failed_at.size_bytes, row.failed_at.operation) == (2, 4 * MIB, "add")
    assert row.peak_reserved_bytes == 8 * MIB
    assert next(compare(trace, [AllocatorSpec("first_fit")], limit_bytes=8 * MIB)).fits is True


def test_recorded_row_fails_where_its_segments_exceed_the_limit() -> None:
    kind = [EventType.RESERVE, EventType.ALLOC, EventType.RESERVE, EventType.ALLOC]
    trace = Trace.of(
        kind, [-1, 0, -1, 1], [512, 100, 1024, 600], address=[0, 0, 512, 512], metadata={"alignment": "512"}
    )
    first, *_ = compare(trace, limit_bytes=1024)
    assert first.allocator == RECORDED
    assert first.failed_at is not None
    assert (first.failed_at.event, first.peak_reserved_bytes) == (3, 1536)
    assert next(compare(trace, limit_bytes=1536)).fits is True


def test_failing_event_is_a_row_of_the_whole_trace() -> None:
    trace = Trace.of([EventType.ALLOC] * 4, [0, 1, 2, 3], MIB, device=[0, 1, 0, 1])
    rows = compare(trace, [AllocatorSpec("first_fit")], limit_bytes=2 * MIB - 1)
    assert [row.failed_at.event for row in rows if isinstance(row, Row) and row.failed_at] == [0, 1]
    rows = compare(trace, [AllocatorSpec("first_fit", {"growth_bytes": MIB})], limit_bytes=2 * MIB - 1)
    assert [row.failed_at.event for row in rows if isinstance(row, Row) and row.failed_at] == [2, 3]


def test_settings_are_numbers_sizes_or_words() -> None:
    assert parse_allocator("best_fit") == AllocatorSpec("best_fit", {})
    assert parse_allocator("first_fit:growth_bytes=4MiB, alignment_bytes=256") == AllocatorSpec(
        "first_fit", {"growth_bytes": 4 * MIB, "alignment_bytes": 256}
    )
    conf = "max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4]"
    assert parse_allocator(f"pytorch:{conf}") == AllocatorSpec("pytorch", {"conf": conf})
    assert parse_allocator(RECORDED) == AllocatorSpec(RECORDED, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("recorded:x=1", "no allocator 'recorded'"),
        ("best_fit:x", "'x' is not KEY=VALUE"),
        ("best_fit:x=1", "best_fit has no setting x; there are alignment_bytes, growth_bytes"),
        ("pytorch:max_split_size_mb:64,tea:3", "tea"),
        ("best_fit:growth_bytes=3", "not a power of two"),
        ("best_fit:growth_bytes=much", "not a power of two"),
    ],
)
def test_unknown_settings_are_refused_before_any_file_is_read(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_allocator(text)


def test_each_file_has_its_result_or_its_own_error() -> None:
    found = dict(map_files(["a", "bad", "abc"], size_or_death))
    assert (found["a"], found["abc"]) == (1, 3)
    assert isinstance(found["bad"], ValueError)


def test_only_the_file_killing_a_process_fails() -> None:
    found = dict(map_files(["kill", "abc"], size_or_death))
    assert isinstance(found.pop("kill"), BrokenProcessPool)
    assert found == {"abc": 3}

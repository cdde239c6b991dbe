"""Logs of RMM as traces, with errors that name the line."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from traces import EventType, TraceError
from traces.formats.registry import sniff
from traces.formats.rmm_log import read_rmm_log
from traces.formats.text_files import MAX_LINE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "Thread,Time,Action,Pointer,Size,Stream\n"


def written(tmp_path: Path, *lines: str, header: str = HEADER) -> Path:
    path = tmp_path / "rmm_log.dev0.csv"
    path.write_text(header + "".join(f"{line}\n" for line in lines))
    return path


def test_a_log_becomes_a_trace_with_addresses_threads_and_streams(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "77,01:00:02.5,allocate,0x100,300,0",
        "99,01:00:02:000007,allocate,0x400,8,0x7",
        "77,01:00:03.000001,allocate failure,(nil),999999,0",
        "99,01:00:04.0,free,0x100,300,0",
    )
    trace = read_rmm_log(path)
    assert sniff(path) == "rmm"
    assert trace.kind.tolist() == [EventType.ALLOC, EventType.ALLOC, EventType.REFUSED, EventType.FREE]
    assert trace.load().tolist() == [300, 308, 308, 8]
    assert trace.size.tolist() == [300, 8, 999_999, 0]
    assert trace.address.tolist() == [0x100, 0x400, -1, -1]
    assert trace.thread.tolist() == [0, 1, 0, 1]
    assert trace.stream.tolist() == [0, 7, 0, 0]
    assert trace.time_ns.tolist() == [
        3602_500_000_000,
        3602_000_007_000,
        3603_000_001_000,
        3604_000_000_000,
    ]
    assert (trace.alignment, trace.metadata["alive_before"]) == (256, "0")


def test_free_without_alloc_belongs_to_an_older_buffer(tmp_path: Path) -> None:
    trace = read_rmm_log(
        written(tmp_path, "1,1634567890.25,allocate,0x100,5,0", "1,1634567891,free,0x900,70,0")
    )
    assert trace.load().tolist() == [70, 75, 5]
    assert trace.metadata["alive_before"] == "1"


@pytest.mark.parametrize(
    ("clock", "minutes"),
    [
        (["23:59:00.0", "00:01:00.0", "23:58:00.0", "00:02:00.0"], [1439, 1441, 1438, 1442]),
        (["13:00:00.0", "02:00:00.0", "14:30:00.0", "01:00:00.0"], [780, 120, 870, 1500]),
        (["20:00:00.0", "06:00:00.0", "20:00:00.0", "06:00:00.0"], [1200, 1800, 2640, 3240]),
        (["00:30:00.0", "23:45:00.0"], [30, 1425]),
    ],
)
def test_clock_going_back_by_half_a_day_has_passed_midnight(
    tmp_path: Path, clock: list[str], minutes: list[int]
) -> None:
    """From there on times are a day later; waiting threads may still write a moment before midnight."""
    lines = [f"1,{time},allocate,{at:#x}00,5,0" for at, time in enumerate(clock, 1)]
    assert read_rmm_log(written(tmp_path, *lines)).time_ns.tolist() == [at * 60 * 10**9 for at in minutes]


def test_empty_requests_at_the_null_pointer_are_skipped(tmp_path: Path) -> None:
    """RMM's pools answer any number of empty requests with a null pointer; no other request has one."""
    nothing = (
        "1,00:00:01.0,allocate,(nil),0,0",
        "1,00:00:01.0,allocate,0x0,0,0",
        "1,00:00:02.0,free,(nil),0,0",
    )
    assert len(read_rmm_log(written(tmp_path, *nothing, *nothing[2:]))) == 0
    some = "1,00:00:01.0,allocate,(nil),5,0"
    with pytest.raises(TraceError, match="row 4: allocated again without a free: address 0x0"):
        read_rmm_log(written(tmp_path, nothing[0], some, some))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1,00:00:01.0,allocate,0x100,5,0", "allocated again without a free: address 0x100"),
        ("1,00:00:01.0,allocate,0x200,-5,0", "size '-5'"),
        ("1,00:00:01.0,allocate,0x200,99999999999999999999,0", "size '9999"),
        ("1,noon,allocate,0x200,5,0", "time: 'noon'"),
        ("1,999999999999.0,allocate,0x200,5,0", "time: '9999"),
        ("1,-4,allocate,0x200,5,0", "time: '-4'"),
        ("1,00:00:01.0,move,0x200,5,0", "actions: 'move'"),
        ("1,00:00:01.0,allocate,0x200,5", "not 6 fields: 5"),
        ("x,00:00:01.0,allocate,0x200,5,0", "thread 'x'"),
        ("1" * (MAX_LINE_BYTES + 1), "longer than"),
        ("1,00:00:01.0,allocate,\udcff,5,0", "not UTF-8"),
    ],
)
def test_invalid_line_is_reported(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "log"
    good = "1,00:00:00.0,allocate,0x100,5,0\n"
    path.write_bytes((HEADER + good + line + "\n").encode("utf-8", "surrogateescape"))
    with pytest.raises(TraceError, match=reason) as caught:
        read_rmm_log(path)
    assert caught.value.file == str(path)
    assert caught.value.row == 3
    assert str(caught.value).count("3") - caught.value.reason.count("3") == str(path).count("3") + 1


def test_another_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a log of RMM"):
        read_rmm_log(written(tmp_path, header="id,lower,upper,size\n"))


def test_clock_beyond_the_largest_time_is_refused(tmp_path: Path) -> None:
    """A clock that passes midnight forever exceeds a trace's times; an impossible time adds no day."""
    turns = [
        f"1,{hour:02}:00:00.0,{what},0x100,5,0" for hour, what in ((23, "allocate"), (0, "free"))
    ] * 60_000
    with pytest.raises(TraceError, match="not a clock's time"):
        read_rmm_log(written(tmp_path, *turns))
    beyond = "1,00:00:999999999999.0,allocate,0x100,5,0"
    trace = read_rmm_log(written(tmp_path, beyond, "1,01:00:00.0,allocate,0x100,5,0"), skipped=Counter())
    assert trace.time_ns.tolist() == [3600 * 10**9]

"""Logs of RMM become traces, and what is none is named with its line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from traces import TraceError
from traces.files import sniff
from traces.rmm_log import read_rmm_log
from traces.text_files import MAX_LINE_BYTES

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
    assert trace.load().tolist() == [300, 308, 8]
    assert trace.address.tolist() == [0x100, 0x400, -1]
    assert trace.thread.tolist() == [0, 1, 1]
    assert trace.stream.tolist() == [0, 7, 0]
    assert trace.time_ns.tolist() == [3602_500_000_000, 3602_000_007_000, 3604_000_000_000]
    assert (trace.alignment, trace.metadata["failures"], trace.metadata["alive_before"]) == (256, "1", "0")


def test_what_is_freed_but_was_never_allocated_was_there_before(tmp_path: Path) -> None:
    trace = read_rmm_log(
        written(tmp_path, "1,1634567890.25,allocate,0x100,5,0", "1,1634567891,free,0x900,70,0")
    )
    assert trace.load().tolist() == [70, 75, 5]
    assert trace.metadata["alive_before"] == "1"


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
def test_a_line_that_cannot_be_is_named(tmp_path: Path, line: str, reason: str) -> None:
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

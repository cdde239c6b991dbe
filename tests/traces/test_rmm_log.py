"""Logs of RMM and of CuPy's hook."""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from pathlib import Path

import pytest

from traces import EventType, TraceError
from traces.formats.cupy_hook import read_cupy_hook
from traces.formats.registry import sniff
from traces.formats.rmm_log import read_rmm_log
from traces.formats.text_files import MAX_LINE_BYTES

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


#: Example of CuPy's documentation.
PRINTED = """\
{"hook":"alloc","device_id":0,"mem_size":512,"mem_ptr":150496608256}
{"hook":"malloc","device_id":0,"size":24,"mem_size":512,"mem_ptr":150496608256,"pmem_id":"0x7f39200c5278"}
{"hook":"free","device_id":0,"mem_size":512,"mem_ptr":150496608256,"pmem_id":"0x7f39200c5278"}
"""


def test_lines_become_buffers_and_segments(tmp_path: Path) -> None:
    """A buffer has the requested size; memory that the pool took from the device is reserved."""
    path = tmp_path / "out"
    path.write_text(PRINTED)
    trace = read_cupy_hook(path)
    assert trace.kind.tolist() == [EventType.RESERVE, EventType.ALLOC, EventType.FREE]
    assert trace.size.tolist() == [512, 24, 0]
    assert trace.address.tolist() == [150496608256, 150496608256, -1]
    assert (trace.alignment, trace.metadata["framework"]) == (512, "cupy")


def test_other_output_of_the_program_is_skipped(tmp_path: Path) -> None:
    """Lines of any length and encoding are skipped, as is the text before an event on a line."""
    path = tmp_path / "out"
    first, second, third = PRINTED.splitlines()
    noise = [b"\xff\xfe epoch 1", b"x" * 300_000, b"", b'{"loss": 3}', b"50%|##  " + first.encode()]
    path.write_bytes(b"\n".join([*noise[:1], noise[4], *noise[1:4], second.encode(), third.encode()]))
    assert sniff(path) == "cupy"
    assert len(read_cupy_hook(path)) == 3


def test_devices_have_separate_addresses(tmp_path: Path) -> None:
    path = tmp_path / "out"
    line = '{"hook":"malloc","device_id":%d,"size":24,"mem_size":512,"mem_ptr":512,"pmem_id":"0x1"}\n'
    path.write_text(line % 0 + line % 1)
    trace = read_cupy_hook(path)
    assert trace.device.tolist() == [0, 1]
    assert trace.buffer.tolist() == [0, 1]
    with pytest.raises(TraceError, match="again without a free: address 0x200"):
        path.write_text(line % 1 + line % 1) and read_cupy_hook(path)


def test_requests_without_memory_are_refused_requests(tmp_path: Path) -> None:
    """A request of the pool to the device may be tried again, and an empty request needs no memory."""
    path = tmp_path / "out"
    path.write_text(
        '{"hook":"alloc","device_id":0,"mem_size":1024,"mem_ptr":0}\n'
        '{"hook":"malloc","device_id":0,"size":1000,"mem_size":1024,"mem_ptr":0,"pmem_id":"0x0"}\n'
        '{"hook":"malloc","device_id":0,"size":0,"mem_size":0,"mem_ptr":0,"pmem_id":"0x7f"}\n'
    )
    trace = read_cupy_hook(path)
    assert (trace.kind.tolist(), trace.size.tolist()) == ([EventType.REFUSED], [1000])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"hook":"malloc","device_id":0,"size":-4,"mem_size":512,"mem_ptr":512}', "size -4"),
        ('{"hook":"malloc","device_id":0,"size":4,"mem_size":512,"mem_ptr":1e3}', "mem_ptr '1000.0'"),
        ('{"hook":"malloc","device_id":0,"size":true,"mem_size":512,"mem_ptr":5}', "size 'True'"),
        ('{"hook":"malloc","device_id":70000,"size":4,"mem_size":512,"mem_ptr":5}', "no device: 70000"),
        (
            '{"hook":"malloc","device_id":0,"size":4,"mem_size":512,"mem_ptr":99999999999999999999}',
            "mem_ptr 9999",
        ),
        ('{"hook":"move","device_id":0,"mem_size":512,"mem_ptr":5}', "hooks: 'move'"),
        ('{"hook":"free","device_id":0,"mem_size":512}', "mem_ptr 'None'"),
        ('{"hook":"free","device_id":0,"mem_si', "not a whole object"),
        ('{"hook":"' + "[" * 30_000, "not a whole object"),
        ('{"hook":"free","a":' + "[" * 30_000, "not a whole object"),
        ('{"hook":"free","a":' + "9" * 30_000 + "}", "not a whole object"),
        ('{"hook":"' + "x" * 70_000, "a line longer than"),
    ],
)
def test_invalid_line_of_cupys_hook_is_reported(tmp_path: Path, line: str, reason: str) -> None:
    path = tmp_path / "out"
    path.write_text(PRINTED + line + "\n")
    with pytest.raises(TraceError, match=reason) as caught:
        read_cupy_hook(path)
    assert (caught.value.file, caught.value.row) == (str(path), 4)


def test_file_without_hook_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_text("hello\n")
    with pytest.raises(TraceError, match="none of its lines is of CuPy's DebugPrintHook"):
        read_cupy_hook(path)


def test_output_of_the_real_hook_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own class prints, called as CuPy's pool does, if CuPy is installed."""
    found = importlib.util.find_spec("cupy")
    if found is None or found.origin is None:
        pytest.skip("CuPy is not installed")
    source = Path(found.origin).parent / "cuda" / "memory_hooks" / "debug_print.py"
    base = types.ModuleType("cupy.cuda.memory_hook")
    base.MemoryHook = object  # type: ignore[attr-defined]
    cuda = types.ModuleType("cupy.cuda")
    cuda.memory_hook = base  # type: ignore[attr-defined]
    for name, module in (("cupy", types.ModuleType("cupy")), ("cupy.cuda", cuda), (base.__name__, base)):
        monkeypatch.setitem(sys.modules, name, module)
    spec = importlib.util.spec_from_file_location("debug_print", source)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    out = io.StringIO()
    hook = loaded.DebugPrintHook(file=out)
    hook.alloc_postprocess(device_id=0, mem_size=1024, mem_ptr=4096)
    hook.malloc_postprocess(device_id=0, size=1000, mem_size=1024, mem_ptr=4096, pmem_id=77)
    hook.free_postprocess(device_id=0, mem_size=1024, mem_ptr=4096, pmem_id=77)
    path = tmp_path / "out"
    path.write_text(out.getvalue())
    trace = read_cupy_hook(path)
    assert trace.kind.tolist() == [EventType.RESERVE, EventType.ALLOC, EventType.FREE]
    assert trace.size.tolist() == [1024, 1000, 0]

"""Output of CuPy's DebugPrintHook as traces, mixed with any output of the program."""

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
def test_invalid_line_is_reported(tmp_path: Path, line: str, reason: str) -> None:
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

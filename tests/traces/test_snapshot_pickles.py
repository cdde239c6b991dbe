"""Pickles of memory snapshots: opcodes, damage and bounds; the long gate runs them under sanitizers."""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_model import assert_same, model_snapshot
from snapshots import event, segment, snapshot, snapshots, stored, write_large

from traces import TraceError
from traces.formats.snapshot import read_snapshot

#: The beginning of a snapshot without events, up to the value of a key; and the end of the file.
HEAD = b"\x80\x04}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces]X\x01\x00\x00\x00x"
TAIL = b"u."


def within(path: Path, body: bytes) -> Path:
    """Write a snapshot with the given opcodes inside a tuple, and return its path."""
    path.write_bytes(HEAD + b"(" + body + b"t" + TAIL)
    return path


class Calls:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("called",)


@pytest.mark.parametrize("value", [Calls(), print, bytearray(b"x"), 1 + 2j, Calls])
def test_opcodes_that_name_or_call_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    with pytest.raises(TraceError, match=r"byte \d+: opcode 0x[0-9a-f]{2} is not one of plain data"):
        read_snapshot(stored(tmp_path / "s", [], x=value))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "body",
    [
        b"]K\x01K\x02K\x03\x87a",
        b"]((K\x01K\x02K\x03te",
        b"\x8f(K\x01\x90",
        b"(K\x01\x91",
        b"\x8a\x00",
        b"\x8b\x00\x00\x00\x00",
        b"\x8b\x09\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01",
        b"\x8e\x01\x00\x00\x00\x00\x00\x00\x00x",
    ],
)
def test_rare_opcodes_are_read(tmp_path: Path, body: bytes) -> None:
    assert len(read_snapshot(within(tmp_path / "s", body))) == 0


@pytest.mark.parametrize(
    "body",
    [
        b"N\x86",  # a pair of one
        b"(N\x86",  # must not reach below the mark
        b"N\x87",
        b"]Nu",
        b"](K\x01K\x02u",  # items into a list
        b"}(K\x01u",  # a key without a value
        b"}K\x01a",  # an element into a dict
        b")K\x01a",
        b"}]K\x01s",  # a list as a key
        b"}\x8fK\x01s",  # a set as a key
        b"](K\x01\x90",  # adds set elements to a list
        b"h\x07",  # never put into the memo
        b"Nq\x09",  # puts skip numbers
        b"\x8c\x01\xff",  # no UTF-8
        b"\x8c\x02\xc0\x80",
        b"\x8c\x03\xe0\x80\x80",
        b"\x8c\x04\xf4\x90\x80\x80",
        b"\x8c\x02\xe2\x82",
        b"\x8b\xff\xff\xff\xff",  # negative length
        b"]q\x00]h\x00ah\x00Na",  # a list that grows after becoming an element
        b"}q\x00]h\x00ah\x00K\x01K\x02s",
        b"]q\x00h\x00a",  # a list that contains itself
    ],
)
def test_inconsistent_opcodes_are_damage(tmp_path: Path, body: bytes) -> None:
    with pytest.raises(TraceError, match=r"byte \d+: the pickle is damaged"):
        read_snapshot(within(tmp_path / "s", body))


@pytest.mark.parametrize("body", [b".", b"(.", b"a.", b"]e.", b"]a.", b"Ns.", b"t.", b"]N(a.", b"q\x00."])
def test_opcodes_with_too_few_values_on_the_stack_are_damage(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "s"
    path.write_bytes(b"\x80\x04" + body)
    with pytest.raises(TraceError, match=r"byte \d+: the pickle is damaged"):
        read_snapshot(path)


def test_single_surrogates_of_file_names_are_shown_as_unknown(tmp_path: Path) -> None:
    frames = [{"name": "f", "filename": "/a\udc80/b\udc80.py", "line": 1}]
    trace = read_snapshot(stored(tmp_path / "s", [event("alloc", 0, 1, frames=frames)]))
    assert trace.names[0] == "b\ufffd\ufffd\ufffd.py:1"


@pytest.mark.parametrize("opcode", [b"\x8d", b"\x8e"])
def test_text_longer_than_the_file_is_truncated(tmp_path: Path, opcode: bytes) -> None:
    body = opcode + (10 * 10**9).to_bytes(8, "little") + b"x" * 1000
    with pytest.raises(TraceError, match="the pickle is truncated"):
        read_snapshot(within(tmp_path / "s", body))


def peak_bytes(path: Path) -> tuple[str, int]:
    """Return the error message, or an empty text, and the peak resident bytes of a reading process."""
    program = """
import sys
from traces import TraceError
from traces.formats.snapshot import read_snapshot
try:
    read_snapshot(sys.argv[1])
except TraceError as error:
    print(error.reason)
status = open("/proc/self/status").read()  # getrusage tells of the parent too
print(1024 * int(status.split("VmHWM:")[1].split()[0]))
"""
    done = subprocess.run([sys.executable, "-c", program, path], capture_output=True, text=True, check=True)
    *reason, peak = done.stdout.splitlines()
    return "".join(reason), int(peak)


@pytest.mark.parametrize("shared", [True, False])
def test_reading_takes_less_memory_than_twice_the_file_size(tmp_path: Path, shared: bool) -> None:
    """Python's own memory is not counted."""
    path = tmp_path / "s"
    write_large(path, 100_000, shared=shared)
    reason, peak = peak_bytes(path)
    assert reason == ""
    assert peak < 2 * path.stat().st_size + (100 << 20)


def test_huge_text_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "s"
    size = 10**10
    with path.open("wb") as file:  # with a hole
        file.write(HEAD + b"\x8d" + size.to_bytes(8, "little"))
        file.seek(min(size, 1 << 28), os.SEEK_CUR)
        file.write(TAIL)
    reason, peak = peak_bytes(path)
    assert reason.endswith("the pickle is truncated")
    assert peak < 200 << 20


@pytest.mark.parametrize("opcode", [b"(", b"\x94", b"N", b"]", b"}"])
def test_pickle_bomb_is_refused(tmp_path: Path, opcode: bytes) -> None:
    path = within(tmp_path / "s", b"N" + opcode * (48 << 20))
    reason, peak = peak_bytes(path)
    assert reason
    assert peak < 800 << 20


def test_exponentially_shared_lists_are_refused(tmp_path: Path) -> None:
    many: list[object] = [{"action": "new"} for _ in range(1000)]
    path = stored(tmp_path / "s", *[many] * 5000)
    with pytest.raises(TraceError, match="again and again"):
        read_snapshot(path)


def test_hundred_thousand_nested_lists_are_read(tmp_path: Path) -> None:
    read_snapshot(within(tmp_path / "s", b"]" * 100_000 + b"a" * 99_999))


def test_snapshot_is_read_through_a_pipe(tmp_path: Path) -> None:
    whole = stored(tmp_path / "s", [event("alloc", 0, 1)])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(whole.read_bytes()))
    writer.start()
    assert_same(read_snapshot(pipe), model_snapshot(whole))
    writer.join()


def test_exception_in_progress_ends_the_reading(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        read_snapshot(stored(tmp_path / "s", []), progress=fail)


def test_ctrl_c_interrupts_the_reading_of_an_endless_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    program = f"from traces.formats.snapshot import read_snapshot; read_snapshot({str(pipe)!r})"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as reader:
        with pipe.open("wb", buffering=0) as file:
            file.write(HEAD + b"\x8d" + (1 << 40).to_bytes(8, "little") + b"x" * (1 << 20))
            while reader.poll() is None:  # a signal just before a wait takes effect only after the wait
                reader.send_signal(signal.SIGINT)
                time.sleep(0.05)
        assert reader.stderr is not None
        assert b"KeyboardInterrupt" in reader.stderr.read()


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    path = stored(tmp_path / "s", [event("alloc", 512 * i, 8) for i in range(5000)])
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(len(read_snapshot(path)))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5000] * 4


def test_a_snapshot_written_like_pytorchs_own_pickler_is_read(tmp_path: Path) -> None:
    """Protocol 2, lists of any length at once, lists and dicts put into the memo once complete."""

    def text(value: str) -> bytes:
        return b"X" + len(value).to_bytes(4, "little") + value.encode()

    frame = b"}(" + text("filename") + text("a.py") + text("line") + b"\x8a\x08" + bytes([7, *[0] * 7]) + b"u"
    stack = b"](" + frame + b"q\x00" + b"eq\x01"
    events = b"".join(
        b"}("
        + text("action")
        + text("alloc")
        + text("addr")
        + b"\x8a\x08"
        + (512 * i).to_bytes(8, "little")
        + text("size")
        + b"K\x05"
        + text("stream")
        + b"K\x00"
        + text("frames")
        + (b"h\x01" if i else stack)
        + b"u"
        for i in range(3000)
    )
    whole = b"\x80\x02}(" + text("segments") + b"](e" + text("device_traces") + b"](](" + events + b"eeu."
    path = tmp_path / "s"
    path.write_bytes(whole)
    assert len(pickle.loads(whole)["device_traces"][0]) == 3000
    trace = read_snapshot(path)
    assert_same(trace, model_snapshot(path))
    assert trace.names == ("a.py:7",)


SHARED = Path(__file__).parents[3] / "shared" / "bench" / "pytorch_snapshots"


def dumped(value: Any, protocol: int, *, python: bool) -> bytes:
    """Pickle by the C or the Python pickler, which differ in framing and memoising."""
    if not python:
        return pickle.dumps(value, protocol)
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(value)  # type: ignore[attr-defined]
    return file.getvalue()


@given(value=snapshots(), protocol=st.integers(2, 5), python=st.booleans())
def test_snapshots_are_read_as_by_the_model(
    tmp_path: Path, value: dict[str, Any], protocol: int, python: bool
) -> None:
    path = tmp_path / "s"
    path.write_bytes(dumped(value, protocol, python=python))
    assert_same(read_snapshot(path), model_snapshot(path))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared snapshots are not here")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.pickle")), ids=lambda path: path.stem)
def test_real_snapshots_are_read_as_by_the_model(path: Path) -> None:
    assert_same(read_snapshot(path), model_snapshot(path))


def small() -> bytes:
    frames = [
        {"name": "at::_ops::mul::call", "filename": "/a/b.py", "line": 300},
        {"filename": "??", "line": 0},
    ]
    trace = [
        event("segment_alloc", 0, 1 << 21, 1),
        event("alloc", 1 << 21, 70_000, 2, frames=frames),
        event("free_completed", 1 << 40, 5, 3, frames=list(frames)),
    ]
    held = [segment((0, 1024, 1000, "active_allocated"), (1024, 1 << 20, 0, "inactive"))]
    return pickle.dumps(snapshot(trace, segments=held, threshold=0.5, pool=(0, 1), flag=True), 4)


def test_snapshot_cut_anywhere_is_reported_as_truncated(tmp_path: Path) -> None:
    whole, path = small(), tmp_path / "s"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match="the pickle is truncated"):
            read_snapshot(path)
        if end < whole.index(b"device_traces") + 13:  # without events the lenient reader refuses it too
            with pytest.raises(TraceError, match="the pickle is truncated"):
                read_snapshot(path, skipped=Counter())


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_lenient_reader_keeps_the_events_before_the_end_of_a_truncated_snapshot(
    tmp_path: Path, devices: int, python: bool
) -> None:
    """The last event, which may be incomplete, and the segments' state at the end are left out."""
    many = [
        event("alloc", 2048 * at, at, at, frames=[{"filename": "a.py", "line": at}]) for at in range(1500)
    ]
    held = [segment((1 << 40, 512, 400, "active_allocated"))]
    whole, path = dumped(snapshot(*[many] * devices, segments=held), 4, python=python), tmp_path / "s"
    most = 0
    for end in [*range(len(whole) // 7, len(whole), len(whole) // 50), *range(len(whole) - 200, len(whole))]:
        path.write_bytes(whole[:end])
        skipped = Counter[str]()
        begun = read_snapshot(path, skipped=skipped)
        assert skipped == {"truncated": 1}
        for device in begun.devices:
            sizes = begun.on_device(device).size.tolist()
            assert sizes == list(range(len(sizes)))
        assert most <= len(begun)
        most = len(begun)
    assert most == 1500 * devices


@given(data=st.data())
@settings(max_examples=300)
def test_a_damaged_snapshot_is_read_as_by_the_model_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole, path = bytearray(small()), tmp_path / "s"
    header = 11  # protocol and frame, of which Python asks more
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(header, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        native = read_snapshot(path)
    except TraceError as error:
        assert error.file == str(path)  # noqa: PT017 - a trace is right, too
    else:
        assert_same(native, model_snapshot(path))


#: Opcodes of plain data, and the bytes that are their usual arguments.
OPCODES = b"\x80\x95(}])\x8fN\x88\x89KMJG\x8a\x8b\x8cX\x8dCB\x8e\x96\x85\x86\x87t\x91\x90usea\x94qrhj."
SOUP = st.lists(st.one_of(st.sampled_from(OPCODES), st.integers(0, 5)), max_size=200)


@given(body=SOUP)
@settings(max_examples=300)
def test_opcodes_in_any_order_are_a_valid_trace_or_refused(tmp_path: Path, body: list[int]) -> None:
    path = within(tmp_path / "s", bytes(body))
    try:
        trace = read_snapshot(path)
    except TraceError as error:
        assert error.file == str(path)  # noqa: PT017 - a trace is right, too
    else:
        trace.validate()

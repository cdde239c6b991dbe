"""Trace files: formats recognised by content, names, and contents."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import stat
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from traces import EventType, Trace, TraceError
from traces.files import atomic
from traces.formats.parquet import TraceWriter, write_trace
from traces.formats.registry import FORMATS, Format, sniff
from traces.read import read, read_pieces
from traces.workload import generate

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import StrPath


def test_file_appears_when_complete_behind_a_link_and_with_the_older_permissions(tmp_path: Path) -> None:
    target, link = tmp_path / "x", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with atomic(link) as beside:
        beside.write_text("new")
        assert target.read_text() == "old"
    assert (link.is_symlink(), target.read_text()) == (True, "new")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert set(tmp_path.iterdir()) == {target, link}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_exception_keeps_the_old_file_and_removes_the_temporary(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "x"
    target.write_text("old")

    def half() -> None:
        with atomic(target) as beside:
            beside.write_text("half")
            raise error

    with pytest.raises(error):
        half()
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (b"PK\3\4" + bytes(60), "torch.cuda.memory._dump_snapshot"),
        (b"[  3311][10:21:05:123456][info  ] ----- RMM LOG BEGIN -----\n", "enable_logging"),
        (b"[ 12][00:00:00:000001][debug ] [A][Stream 0x0][Upstream 1024B]\n", "logging_resource_adaptor"),
    ],
)
def test_error_for_files_without_events_names_the_remedy(content: bytes, remedy: str, tmp_path: Path) -> None:
    """Such files are a snapshot written by torch.save, and RMM's debug log."""
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=remedy):
        sniff(path)


def to_nobody(pipe: Path, kind: str) -> None:
    """Write to a pipe without a reader."""
    reader = threading.Thread(target=lambda: pipe.open("rb").close())
    reader.start()
    if kind == "bytes":
        with atomic(pipe) as path, path.open("wb") as file:
            reader.join()
            file.write(b"x")
    else:
        with TraceWriter(pipe) as writer:
            reader.join()
            writer.write(Trace.of([EventType.ALLOC], [0], [1]))


@pytest.mark.parametrize("kind", ["bytes", "trace"])
def test_failed_write_names_the_file_and_keeps_a_pipe(tmp_path: Path, kind: str) -> None:
    """On a failed write Arrow removes the path by name, even a device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BrokenPipeError) as raised:
        to_nobody(pipe, kind)
    assert raised.value.filename == str(pipe)
    assert pipe.is_fifo()


def test_special_files_are_not_replaced(tmp_path: Path) -> None:
    with atomic(os.devnull) as path:
        path.write_text("gone")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(IsADirectoryError), atomic(tmp_path):
        pass
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "none" / "x"):
        pass


@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1" + b"\xff" * 100 + b"PAR1", b"hello", gzip.compress(b"id,lower,upper,size\n")],
    ids=["empty", "parquet", "text", "gzip"],  # gzip's content has the time, and each worker its own
)
def test_unknown_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=str(path)):
        sniff(path)


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    """A pipe without a writer is refused too, without being opened. A link counts as the target."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(TraceError, match=f"{path}: no regular file.*store it first"):
            sniff(path)


def test_foreign_parquet_file_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="neither a trace nor a plan"):
        sniff(path)


EVENTS = 40_000


def rmm(file: Path) -> None:
    actions = ["allocate", "free"] * (EVENTS // 2)
    rows = [f"1,{at},{what},0x{100 * (at // 2 + 1):x},64,0" for at, what in enumerate(actions)]
    file.write_text("Thread,Time,Action,Pointer,Size,Stream\n" + "\n".join(rows) + "\n")


def cupy(file: Path) -> None:
    one = {"hook": "malloc", "device_id": 0, "mem_size": 512, "size": 512}
    lines = (json.dumps({**one, "mem_ptr": 512 * (at + 1), "pmem_id": "0x1"}) for at in range(EVENTS))
    file.write_text("\n".join(lines) + "\n")


def chrome(file: Path) -> None:
    memory = {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 0, "tid": 0}
    events = [
        {**memory, "ts": at, "args": {"Addr": 64 * (at + 1), "Bytes": 64, "Device Type": 0, "Device Id": -1}}
        for at in range(EVENTS)
    ]
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode(), 1))


def snapshot(file: Path) -> None:
    events = [
        {"action": "alloc", "addr": 512 * (at + 1), "size": 8, "stream": 0, "time_us": at, "frames": []}
        for at in range(6 * EVENTS)
    ]
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": [events]}, 4))


def parquet(file: Path) -> None:
    write_trace(generate(2000, 1, iterations=50), file)


@pytest.mark.parametrize("write", [rmm, cupy, chrome, snapshot, parquet])
def test_progress_rises_to_the_end_of_the_file(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Progress never falls, never exceeds the whole, takes several steps, and reaches the end."""
    write(tmp_path / "file")
    told: list[tuple[int, int]] = []
    trace = read(tmp_path / "file", progress=lambda done, everything: told.append((done, everything)))
    assert len(trace) >= EVENTS
    [whole] = {everything for _, everything in told}
    assert whole in ((tmp_path / "file").stat().st_size, len(trace))
    done = [one for one, _ in told]
    assert done == sorted(done)
    assert done[-1] == whole
    assert len(set(done)) > 1


def test_registered_format_is_recognised_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader of five lines and one line of the registry are a format."""

    def read_lengths(path: StrPath, **_: Any) -> Trace:
        sizes = [int(text) for text in Path(path).read_text().split()[1:]]
        return Trace.of([EventType.ALLOC] * len(sizes), range(len(sizes)), sizes)

    lengths = Format("lengths", "lengths", lambda head: head.line == b"lengths", read_lengths)
    monkeypatch.setattr("traces.formats.registry.FORMATS", (lengths, *FORMATS))
    (tmp_path / "file").write_text("lengths\n3 4\n")
    assert sniff(tmp_path / "file") == "lengths"
    assert read(tmp_path / "file").load().tolist() == [3, 7]
    assert [piece.load().tolist() for piece in read_pieces(tmp_path / "file")] == [[3, 7]]

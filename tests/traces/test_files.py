"""Atomic writing of files, and recognition of formats by content."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from pathlib import Path

import pytest

from traces import EventType, Trace, TraceError
from traces.files import atomic
from traces.formats.parquet import TraceWriter
from traces.formats.registry import sniff


def test_file_appears_only_when_complete(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with atomic(target) as beside:
        beside.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


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


def test_a_link_is_followed_and_permissions_are_kept(tmp_path: Path) -> None:
    target, link = tmp_path / "x", tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    with atomic(link) as beside:
        beside.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert stat.S_IMODE(target.stat().st_mode) == 0o640


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

"""A file is written whole or not at all, and is known by its content."""

from __future__ import annotations

import gzip
import os
import stat
import threading
from pathlib import Path

import pytest

from traces import Kind, Trace, TraceError
from traces.files import atomic, sniff
from traces.parquet import TraceWriter


def test_a_file_appears_only_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.write_text("old")
    with atomic(target) as beside:
        beside.write_text("new")
        assert target.read_text() == "old"
    assert target.read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_leaves_the_old_file_and_nothing_beside(
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
def test_files_that_hold_no_events_name_the_remedy(content: bytes, remedy: str, tmp_path: Path) -> None:
    """A snapshot that torch.save wrote, and RMM's debug log."""
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=remedy):
        sniff(path)


def to_nobody(pipe: Path, kind: str) -> None:
    """Write to a pipe whose reader has gone."""
    reader = threading.Thread(target=lambda: pipe.open("rb").close())
    reader.start()
    if kind == "bytes":
        with atomic(pipe) as path, path.open("wb") as file:
            reader.join()
            file.write(b"x")
    else:
        with TraceWriter(pipe) as writer:
            reader.join()
            writer.write(Trace.of([Kind.ALLOC], [0], [1]))


@pytest.mark.parametrize("kind", ["bytes", "trace"])
def test_a_write_that_fails_names_the_file_and_removes_no_pipe(tmp_path: Path, kind: str) -> None:
    """Arrow removes by name what it cannot write to, a device as well."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BrokenPipeError) as raised:
        to_nobody(pipe, kind)
    assert raised.value.filename == str(pipe)
    assert pipe.is_fifo()


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    with atomic(os.devnull) as path:
        path.write_text("gone")
    assert Path(os.devnull).is_char_device()
    with pytest.raises(IsADirectoryError), atomic(tmp_path):
        pass
    with pytest.raises(FileNotFoundError), atomic(tmp_path / "none" / "x"):
        pass


def test_a_csv_is_known_by_its_header(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_text("\ufeffid, lower,upper,Size\n")
    assert sniff(path) == "csv"


def test_formats_that_are_not_read_packed_are_refused_so(tmp_path: Path) -> None:
    path = tmp_path / "x.csv.gz"
    path.write_bytes(gzip.compress(b"id,lower,upper,size\n"))
    with pytest.raises(TraceError, match="neither"):
        sniff(path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + b"\xff" * 100 + b"PAR1", b"hello", b"\0" * 9])
def test_a_file_that_is_nothing_of_ours_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=str(path)):
        sniff(path)


def test_what_can_be_read_only_once_is_refused_so(tmp_path: Path) -> None:
    """A pipe that nobody writes to, too: it is not opened. What a link leads to counts."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(TraceError, match=f"{path}: no regular file.*store it first"):
            sniff(path)


def test_a_parquet_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "x"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(TraceError, match="neither a trace nor a plan"):
        sniff(path)

"""Round trips of traces through Parquet, and refusal of all other files."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import EventType, Trace, TraceError
from traces.formats import parquet as module
from traces.formats.parquet import TraceWriter, iter_trace, read_trace, write_trace
from traces.formats.registry import sniff
from traces.trace import COLUMNS, NAMED

A, F, R, W, M, *_ = EventType


def sample(n: int, seed: int = 0, first: int = 0) -> Trace:
    """Return a trace of n buffers that are allocated and freed, with a value in every column."""
    rng = np.random.default_rng(seed)
    names = ["conv", "näme", "a.py:3", "\udcff.py:1", "unused"]
    ids = np.arange(first, first + n)
    return Trace.of(
        np.repeat([A, F], n),
        np.concatenate([ids, rng.permutation(ids)]),
        np.concatenate([rng.integers(0, 2**62, n) >> 40, np.zeros(n, np.int64)]),
        stream=rng.integers(-(2**63), 2**63 - 1, 2 * n),
        device=rng.integers(-1, 4, 2 * n),
        thread=rng.integers(0, 4, 2 * n),
        time_ns=np.sort(rng.integers(0, 2**60, 2 * n)),
        operation=rng.integers(-1, 2, 2 * n),
        frame=rng.integers(-1, 4, 2 * n),
        module=rng.integers(-1, 4, 2 * n),
        category=np.where(np.arange(2 * n) < n, rng.integers(-1, 3, 2 * n), -1),
        address=np.where(np.arange(2 * n) < n, rng.integers(-1, 2**62, 2 * n), -1),
        names=names,
        metadata={"alignment": "64", "framework": "nümpy"},
    )


def texts(trace: Trace, column: str) -> list[str | None]:
    index = getattr(trace, column)
    return [None if i < 0 else trace.names[i].replace("\udcff", "\\udcff") for i in index]


def assert_same(one: Trace, other: Trace) -> None:
    for name in COLUMNS:
        if name in NAMED:
            assert texts(one, name) == texts(other, name)
        else:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("n", [0, 1, 1000])
def test_trace_survives_a_round_trip(tmp_path: Path, n: int) -> None:
    path = tmp_path / "t"
    trace = sample(n)
    write_trace(trace, path)
    back = read_trace(path)
    assert_same(back, trace)
    assert back.metadata == trace.metadata
    assert "unused" not in back.names
    assert sniff(path) == "trace"
    assert list(tmp_path.iterdir()) == [path]


def test_pieces_join_to_a_trace_in_row_groups_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PIECE_EVENTS", 64)
    path = tmp_path / "t"
    pieces = [sample(n, seed=n, first=1000 * n) for n in (1, 3, 0, 100, 20, 7)]
    with TraceWriter(path, metadata={"alignment": "8"}) as writer:
        for piece in pieces:
            writer.write(piece)
        assert not path.exists()
    groups = pq.read_metadata(path)
    assert max(groups.row_group(i).num_rows for i in range(groups.num_row_groups)) <= 64
    whole = read_trace(path)
    assert whole.alignment == 8
    back = list(iter_trace(path))
    assert max(len(piece) for piece in back) <= 64
    for name in ("buffer", "size", "time_ns"):
        wrote = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_array_equal(getattr(whole, name), wrote)
        np.testing.assert_array_equal(np.concatenate([getattr(piece, name) for piece in back]), wrote)
    frames = [text for piece in pieces for text in texts(piece, "frame")]
    assert texts(whole, "frame") == frames
    assert [text for piece in back for text in texts(piece, "frame")] == frames


def test_an_exception_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def half() -> None:
        with TraceWriter(tmp_path / "t") as writer:
            writer.write(sample(10))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    with pytest.raises(TraceError, match="unknown kind"), TraceWriter(tmp_path / "t") as writer:
        writer.write(Trace.of([len(EventType)], [0]))
    with pytest.raises(TraceError, match="row 0: free"):
        write_trace(Trace.of([F], [0]), tmp_path / "t")
    assert list(tmp_path.iterdir()) == []


def test_other_tools_read_plain_columns(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_trace(Trace.of([A, M], [5, -1], [64, 0], operation=[0, -1], names=["conv"]), path)
    table = pq.read_table(path)
    assert table.column_names == list(COLUMNS)
    assert table.column("kind").to_pylist() == ["alloc", "mark"]
    assert table.column("operation").to_pylist() == ["conv", None]
    assert table.schema.metadata[b"mempool.kind"] == b"trace"


def test_missing_address_column_is_read_as_unknown(tmp_path: Path) -> None:
    path = tmp_path / "t"
    trace = sample(5)
    write_trace(trace, path)
    pq.write_table(pq.read_table(path).drop_columns("address"), path)
    for back in (read_trace(path), *iter_trace(path)):
        np.testing.assert_array_equal(back.size, trace.size)
        assert (back.address == -1).all()


def rewritten(path: Path, change: Any) -> None:
    """Write a valid trace's table again, modified."""
    write_trace(sample(5), path)
    pq.write_table(change(pq.read_table(path)), path)


def replaced(name: str, values: Any) -> Any:
    return lambda table: table.set_column(table.column_names.index(name), name, values)


def told(key: str, value: str | None) -> Any:
    def change(table: pa.Table) -> pa.Table:
        metadata = {k: v for k, v in table.schema.metadata.items() if k != key.encode()}
        return table.replace_schema_metadata(metadata | ({key: value} if value is not None else {}))

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (told("mempool.version", "2"), "version '2'"),
        (told("mempool.version", None), "version 'none'"),
        (told("mempool.kind", "plan"), "not a trace, but 'plan'"),
        (told("mempool.kind", None), "not a trace"),
        (told("trace.alignment", "3"), "alignment"),
        (lambda table: table.drop_columns(["size"]), "0 columns are called 'size'"),
        (lambda table: table.append_column("size", table["size"]), "2 columns are called 'size'"),
        (replaced("size", pa.array(["x"] * 10)), "column 'size' holds string"),
        (replaced("size", pa.array([1.5] * 10)), "column 'size' holds double"),
        (replaced("size", pa.array([None, *range(9)], pa.int64())), "'size' has empty fields"),
        (replaced("kind", pa.array([1] * 10)), "column 'kind' holds int64"),
        (replaced("kind", pa.array(["explode"] * 10)), "row 0: unknown kind"),
        (replaced("kind", pa.array([None, *["alloc"] * 9])), "'kind' has empty fields"),
        (replaced("size", pa.array([-5, *range(9)])), "row 0: negative size"),
        (replaced("frame", pa.array([[1]] * 10)), "column 'frame' holds list"),
        (lambda table: table.slice(3), "row 2: free of buffer"),
        (lambda table: pa.concat_tables([table, table]), "row 10: buffer 0 is allocated a second time"),
    ],
)
def test_invalid_file_is_refused_by_name_and_reason(tmp_path: Path, change: Any, reason: str) -> None:
    path = tmp_path / "t"
    rewritten(path, change)
    with pytest.raises(TraceError, match=reason) as caught:
        read_trace(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_foreign_table_with_extra_columns_is_read(tmp_path: Path) -> None:
    path = tmp_path / "t"

    def plain(table: pa.Table) -> pa.Table:
        strings = table["kind"].cast(pa.string())
        return replaced("kind", strings)(table).append_column("mine", table["size"])

    rewritten(path, plain)
    assert_same(read_trace(path), sample(5))


def test_more_events_than_fit_are_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    write_trace(sample(50), path)
    monkeypatch.setattr(module, "MAX_EVENTS", 99)
    with pytest.raises(TraceError, match="100 events are more than 99"):
        read_trace(path)


def test_streaming_memory_is_bounded_by_a_few_pieces(tmp_path: Path) -> None:
    path = tmp_path / "t"
    piece = sample(1 << 15)
    before = pa.total_allocated_bytes()
    most = 0
    with TraceWriter(path) as writer:
        for _ in range(32):
            writer.write(piece)
            most = max(most, pa.total_allocated_bytes() - before)
    rows = 0
    for part in iter_trace(path):
        rows += len(part)
        most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 32 * len(piece)
    assert most < 32 * 2**20  # the events are 98 MiB


@pytest.mark.skipif(int(pa.__version__.split(".")[0]) < 20, reason="Arrow 15 itself dies of some such files")
@given(st.data())
def test_a_damaged_file_is_refused_or_read_but_never_crashes(tmp_path: Path, data: st.DataObject) -> None:
    good, path = tmp_path / "good", tmp_path / "t"
    if not good.exists():
        write_trace(sample(200), good)
    content = bytearray(good.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
        path.write_bytes(content)
        with pytest.raises(TraceError, match=str(path)):
            read_trace(path)
        return
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        read_trace(path).validate()


@pytest.mark.parametrize("name", COLUMNS)
def test_parquet_schema_contradicting_the_arrow_schema_is_refused(tmp_path: Path, name: str) -> None:
    """Arrow's own schema has the column; in the file's schema a letter of the column's name differs."""
    good, path = tmp_path / "good", tmp_path / "t"
    write_trace(sample(200), good)
    content = good.read_bytes()
    for found in re.finditer(re.escape(name.encode()), content):
        path.write_bytes(content[: found.end() - 1] + b"#" + content[found.end() :])
        with contextlib.suppress(TraceError):
            read_trace(path).validate()

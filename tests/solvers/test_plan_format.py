"""Plan files: round trip, and at most one clear error for any damaged file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import Plan, PlanError, Stop, check, read_plan, read_plan_columns, solve, write_plan
from traces.buffers import COLUMNS, GAPS, Buffers
from traces.errors import TraceError
from traces.formats.registry import sniff

TWO = Buffers.of([0, 1], [2, 13], [4, 8], alignment=4, ids=["a", "b"], gaps=[(1, 3, 5)], period=10)


def stored(folder: Path) -> Path:
    path = folder / "plan.parquet"
    write_plan(solve(TWO), TWO, path)
    return path


@given(buffers=st.from_type(Buffers), named=st.booleans(), capacity=st.sampled_from([None, 12]))
def test_plan_and_its_buffers_round_trip(
    tmp_path: Path, buffers: Buffers, named: bool, capacity: int | None
) -> None:
    if named:
        buffers = dataclasses.replace(buffers, ids=tuple(f"b{i}" for i in range(len(buffers))))
    plan = solve(buffers, stop=Stop(nodes=0), solver="greedy", capacity=capacity)
    path = tmp_path / "plan.parquet"
    if plan.offset is None:
        with pytest.raises(PlanError, match="no offsets to write"):
            write_plan(plan, buffers, path)
        return
    write_plan(plan, buffers, path, extra={"a": "ä", "b": ""})
    again, same, extra = read_plan(path)
    check(again, same)
    assert again.offset is not None
    assert (again.offset == plan.offset).all()
    assert {f.name: getattr(again, f.name) for f in dataclasses.fields(Plan) if f.name != "offset"} == {
        f.name: getattr(plan, f.name) for f in dataclasses.fields(Plan) if f.name != "offset"
    }
    for name in (*COLUMNS, *GAPS):
        assert (getattr(same, name) == getattr(buffers, name)).all()
    assert (same.ids, same.period) == (buffers.ids, buffers.period)
    assert extra == {"a": "ä", "b": ""}


def test_arrays_of_any_length_come_back_with_their_type(tmp_path: Path) -> None:
    arrays = {
        "sequence": np.arange(1000, dtype=np.int64) * -(2**40),
        "flags": np.array([True, False]),
        "none": np.zeros(0, np.float64),
    }
    write_plan(solve(TWO), TWO, tmp_path / "p", extra_columns=arrays)
    back = read_plan_columns(tmp_path / "p")
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert (back[name] == array).all()
    with pytest.raises(PlanError, match="array 'x' of <U1"):
        write_plan(solve(TWO), TWO, tmp_path / "p", extra_columns={"x": np.array(["a"])})


def test_file_is_a_plain_table_for_any_parquet_tool(tmp_path: Path) -> None:
    assert sniff(stored(tmp_path)) == "plan"
    table = pq.read_table(stored(tmp_path)).to_pydict()
    assert table["id"] == ["a", "b"]
    assert table["gap_start"] == [[], [3]]
    assert [len(offsets) for offsets in table["offset"]] == [2, 2]


def test_file_cut_anywhere_is_a_single_error_with_its_name(tmp_path: Path) -> None:
    data = stored(tmp_path).read_bytes()
    path = tmp_path / "cut.parquet"
    for length in range(0, len(data), 97):
        path.write_bytes(data[:length])
        with pytest.raises(TraceError, match=r"cut\.parquet"):
            read_plan(path)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=5))
def test_file_with_wrong_bytes_is_a_plan_or_a_single_error(
    tmp_path: Path, bytes_: list[tuple[int, int]]
) -> None:
    data = bytearray(stored(tmp_path).read_bytes())
    for place, value in bytes_:
        data[place % len(data)] = value
    path = tmp_path / "wrong.parquet"
    path.write_bytes(data)
    try:
        plan, buffers, _ = read_plan(path)
        check(plan, buffers)
    except (PlanError, TraceError):
        pass


def changed(folder: Path, metadata: dict[str, str] | None = None, **columns: Any) -> Path:
    """The stored plan with other metadata or columns."""
    table = pq.read_table(stored(folder))
    for name, values in columns.items():
        table = table.drop_columns([name])
        if values is not None:
            table = table.append_column(name, values)
    said = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    path = folder / "changed.parquet"
    pq.write_table(table.replace_schema_metadata(said | (metadata or {})), path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"metadata": {"mempool.version": "9"}}, "version '9'"),
        ({"metadata": {"mempool.kind": "trace"}}, "not a plan, but 'trace'"),
        ({"metadata": {"plan.arena_bytes": "much"}}, "its arena_bytes is 'much'"),
        ({"metadata": {"plan.arena_bytes": "9" * 30}}, "an arena or a bound of 999"),
        ({"metadata": {"plan.nodes": "many"}}, "its nodes is 'many'"),
        ({"metadata": {"plan.status": "great"}}, "its status is 'great'"),
        ({"metadata": {"plan.period": "9" * 5000}}, "its period is '999"),
        ({"metadata": {"plan.period": "1"}}, "row 1: start is outside the period"),
        ({"size": None}, "0 columns are called 'size'"),
        ({"size": pa.array(["4", "8"])}, "column 'size' holds string"),
        ({"size": pa.array([4, None])}, "empty fields"),
        ({"size": pa.array([4, -8])}, "row 1: negative size"),
        ({"offset": pa.array([[0], [0, 1]])}, "buffers have 1 to 2 offsets"),
        ({"offset": pa.array([[0], [None]], pa.list_(pa.int64()))}, "'offset' has empty fields"),
        ({"offset": pa.array([[], []], pa.list_(pa.int64()))}, "0 to 0 offsets"),
        ({"gap_end": pa.array([[], [5, 6]])}, "a gap without"),
        ({"id": pa.array(["a", "a"])}, "duplicate id 'a'"),
    ],
)
def test_each_contradiction_is_a_single_error_with_the_file_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = changed(tmp_path, **change)
    with pytest.raises((PlanError, TraceError), match=message) as caught:
        read_plan(path)
    assert "changed.parquet" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_array_is_a_single_error_with_the_file_name(tmp_path: Path) -> None:
    for text in ("object:AAAA", "int64:AAAA", "int64:!", "int64"):
        with pytest.raises(PlanError, match=r"changed.parquet.*'array.x' is not an array"):
            read_plan_columns(changed(tmp_path, metadata={"array.x": text}))


def test_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = stored(tmp_path)
    before = path.read_bytes()
    with pytest.raises(PlanError):
        write_plan(solve(TWO), TWO, path, extra_columns={"x": np.zeros((2, 2))})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]

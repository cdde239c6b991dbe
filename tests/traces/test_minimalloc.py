"""Reading and writing of MiniMalloc CSV files as MiniMalloc does, with errors that name the line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces import Buffers, TraceError
from traces.buffers import COLUMNS, GAPS
from traces.formats import minimalloc as module
from traces.formats.minimalloc import read_csv, write_csv
from traces.formats.registry import sniff

BENCH = Path(__file__).parents[2] / "../shared/bench/minimalloc"


@st.composite
def lines(draw: st.DrawFn) -> Buffers:
    n = draw(st.integers(0, 5))
    start = draw(st.lists(st.integers(-50, 50), min_size=n, max_size=n))
    end = [s + draw(st.integers(0, 30)) for s in start]
    gaps = [
        (i, at, at + 1) for i, (s, e) in enumerate(zip(start, end, strict=True)) for at in range(s, e - 1, 7)
    ]
    names = st.text(st.characters(codec="utf-8", exclude_characters=",", exclude_categories=["C", "Z"]))
    ids = draw(st.lists(names, min_size=n, max_size=n, unique=True))
    return Buffers.of(
        start,
        end,
        draw(st.lists(st.integers(0, 2**62), min_size=n, max_size=n)),
        alignment=draw(st.lists(st.sampled_from([1, 64, 2**62]), min_size=n, max_size=n)),
        offset=draw(st.lists(st.integers(-1, 2**62), min_size=n, max_size=n)),
        gaps=gaps if draw(st.booleans()) else (),
        ids=ids,
    )


def assert_same(one: Buffers, other: Buffers) -> None:
    assert one.ids == other.ids
    for name in (*COLUMNS, *GAPS):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


@given(lines())
def test_buffers_survive_a_round_trip(tmp_path: Path, buffers: Buffers) -> None:
    path = tmp_path / "x.csv"
    write_csv(buffers, path)
    assert_same(read_csv(path), buffers)
    assert sniff(path) == "csv"


@given(lines(), st.data())
def test_column_order_and_name_of_the_end_do_not_matter(
    tmp_path: Path, buffers: Buffers, data: st.DataObject
) -> None:
    table = {
        data.draw(st.sampled_from(["id", "buffer", "buffer_id", "ID"])): buffers.ids,
        data.draw(st.sampled_from(["lower", "start", "begin"])): buffers.start,
        "size": buffers.size,
        "alignment": buffers.alignment,
        "offset": ["" if offset == -1 else offset for offset in buffers.offset],
        "hint": ["anything"] * len(buffers),
        "end": buffers.end - 1,
        "gaps": [
            " ".join(
                f"{s}-{e - 1}"
                for b, s, e in zip(buffers.gap_buffer, buffers.gap_start, buffers.gap_end, strict=True)
                if b == row
            )
            for row in range(len(buffers))
        ],
    }
    order = data.draw(st.permutations(list(table)))
    rows = zip(*(table[name] for name in order), strict=True)
    text = "\r\n".join([",".join(order), *(" , ".join(map(str, row)) for row in rows), "", ""])
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert_same(read_csv(path), buffers)


def test_a_solution_is_written_in_the_place_of_fixed_offsets(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    buffers = Buffers.of([0, 1], [2, 3], 8, offset=[0, -1])
    write_csv(buffers, path, offsets=[16, 24])
    assert path.read_text() == "id,lower,upper,size,offset\n0,0,2,8,16\n1,1,3,8,24\n"
    with pytest.raises(TraceError, match="offsets has 1 rows"):
        write_csv(buffers, path, offsets=[16])


HEAD = "id,lower,upper,size\n"


@pytest.mark.parametrize(
    ("text", "row", "reason"),
    [
        ("", 1, "empty"),
        ("\n\n", 1, "empty"),
        ("hello\n", 1, "unknown column 'hello'"),
        ("id,lower,size\n", 1, "no column 'upper' or 'end'"),
        ("id,lower,upper,end,size\n", 1, "a second column for 'upper'"),
        (HEAD + "a,0,1,8\nb,0,1\n", 3, "3 fields, the header has 4"),
        (HEAD + "a,0,1,8\n\nb,0,1,8\n", 3, "an empty line"),
        (HEAD + "a,x,1,8\n", 2, "lower 'x' is not a whole number"),
        (HEAD + "a,0,1_0,8\n", 2, "upper '1_0'"),
        (HEAD + "a,0,1,٣\n", 2, "size"),
        (HEAD + "a,0,1,\n", 2, "size ''"),
        (HEAD + "a,0,1,1e3\n", 2, "size '1e3'"),
        (HEAD + f"a,0,1,{2**62 + 1}\n", 2, "within 2"),
        (HEAD + "a,0,1," + "9" * 9999 + "\n", 2, "within 2"),
        (HEAD + "a,0,1,8\nb,5,4,8\n", 3, "end before start"),
        (HEAD + "a,0,1,-8\n", 2, "negative size"),
        (HEAD + "a,0,1,8\na,0,1,8\n", 3, "duplicate id 'a'"),
        ("id,lower,upper,size,alignment\na,0,1,8,3\n", 2, "power of two"),
        ("id,lower,upper,size,gaps\na,0,9,8,2-3@1:17\n", 2, "window"),
        ("id,lower,upper,size,gaps\na,0,9,8,2-3-4\n", 2, "gap '3-4'"),
        ("id,lower,upper,size,gaps\na,0,9,8,7\n", 2, "LOWER-UPPER"),
        ("id,lower,upper,size,gaps\na,0,9,8,8-10\n", 2, "outside the lifetime"),
        ("id,lower,upper,size,offset\na,0,9,8,-2\n", 2, "negative offset"),
    ],
)
def test_bad_line_is_reported_with_file_row_and_reason(
    tmp_path: Path, text: str, row: int, reason: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=reason) as caught:
        read_csv(path)
    assert str(caught.value).startswith(f"{path}, row {row}: ")
    assert len(str(caught.value)) < len(str(path)) + 200


def test_bytes_other_than_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(HEAD.encode() + b"\xff,0,1,8\n")
    with pytest.raises(TraceError, match=r"row 2: not UTF-8"):
        read_csv(path)


def test_endless_lines_and_endless_files_are_refused_while_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # ten gigabytes without a line end, and sparse
    with pytest.raises(TraceError, match="row 1: a line of more than"):
        read_csv(path)
    monkeypatch.setattr(module, "MAX_BUFFERS", 3)
    path.write_text(HEAD + "".join(f"{i},0,1,8\n" for i in range(9)))
    with pytest.raises(TraceError, match="row 5: more than 3"):
        read_csv(path)
    path.write_text("id,lower,upper,size,gaps\na,0,99,8,1-2 3-4 5-6 7-8\n")
    with pytest.raises(TraceError, match="row 2: more than 3"):
        read_csv(path)


@pytest.mark.parametrize(
    "columns",
    [
        {"period": 9},
        {"persistent": [True, False]},
        {"group": [0, 1]},
        {"ids": ["a", "b,c"]},
        {"ids": ["a", "b\nc"]},
        {"ids": ["a", " b"]},
        {"ids": ["a", "\udcff"]},
    ],
)
def test_unsupported_buffers_are_refused_and_no_file_is_written(tmp_path: Path, columns: dict) -> None:
    with pytest.raises(TraceError):
        write_csv(Buffers.of([0, 1], [2, 3], 8, **columns), tmp_path / "x.csv")
    assert list(tmp_path.iterdir()) == []

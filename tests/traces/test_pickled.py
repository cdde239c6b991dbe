"""Pickles of plain data are read as Python reads them, and no others are."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from traces import TraceError
from traces.pickled import read_plain

if TYPE_CHECKING:
    from pathlib import Path

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=300)
    | st.integers(2**2000, 2**2100)
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=20,
)
SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@given(value=PLAIN, protocol=st.integers(3, 5))
@SAME_FOLDER
def test_plain_data_comes_back_as_pickle_reads_it(tmp_path: Path, value: Any, protocol: int) -> None:
    path = tmp_path / "p"
    path.write_bytes(pickle.dumps([value, value], protocol))  # the second is fetched from the memo
    assert read_plain(path) == [value, value]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_large_tables_and_long_texts_come_back(tmp_path: Path, protocol: int) -> None:
    value = {"x" * 70_000: list(range(5000)), "table": {str(i): (i, -i, i**9) for i in range(3000)}}
    path = tmp_path / "p"
    path.write_bytes(pickle.dumps(value, protocol))
    assert read_plain(path) == value


class Calls:
    def __reduce__(self) -> tuple[object, ...]:
        return print, ("called",)


@pytest.mark.parametrize("value", [Calls(), print, {1, 2}, bytearray(b"x"), 1 + 2j])
def test_what_would_name_or_call_anything_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: object
) -> None:
    path = tmp_path / "p"
    path.write_bytes(pickle.dumps([value], 5))
    with pytest.raises(TraceError, match="is not one of plain data"):
        read_plain(path)
    assert capsys.readouterr().out == ""


def test_a_truncated_pickle_is_named_wherever_it_ends(tmp_path: Path) -> None:
    whole = pickle.dumps({"a": [1, 2.5, "text", (None, True)], "b": 2**70}, 4)
    path = tmp_path / "p"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match="the pickle is truncated"):
            read_plain(path)


@pytest.mark.parametrize(
    "body",
    [
        b"N\x86",  # a pair of one
        b"N\x87",
        b"Nt",  # a tuple without a mark
        b"]Nu",
        b"](K\x01K\x02u",  # items into a list
        b"}(K\x01u",  # a key without a value
        b"}K\x01a",  # an element into a dict
        b")K\x01a",
        b"}]K\x01s",  # a list as a key
        b"h\x07",  # never put there
        b"a",
        b"\x8c\x01\xff",  # no UTF-8
    ],
)
def test_opcodes_that_do_not_fit_each_other_are_damage(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "p"
    path.write_bytes(b"\x80\x04" + body + b".")
    with pytest.raises(TraceError, match="the pickle is damaged"):
        read_plain(path)


@given(data=st.data())
@SAME_FOLDER
def test_damaged_bytes_give_a_value_or_the_one_error(tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(pickle.dumps({"a": [1, 2.5, "text", (None, True), [], {}], "b": 2**70}, 4))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "p"
    path.write_bytes(whole)
    try:
        read_plain(path)
    except TraceError as error:
        assert error.file == str(path)  # noqa: PT017 - a value is right, too

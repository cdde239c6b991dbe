"""Streaming of Chrome trace events, compared with the standard library's reader of the whole."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces.formats.json_events as module
from traces import TraceError
from traces.formats.json_events import trace_events

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    events=st.lists(VALUES, max_size=8),
    before=st.dictionaries(st.text(max_size=5).filter(lambda key: key != "traceEvents"), VALUES, max_size=3),
    indent=st.sampled_from([None, 1]),
    plain=st.booleans(),
    chunk=st.integers(1, 40),
    packed=st.booleans(),
)
@settings(max_examples=200)
def test_events_match_the_standard_library(
    events: list[Any],
    before: dict[str, Any],
    indent: int | None,
    plain: bool,
    chunk: int,
    packed: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The keys before the list, the spacing of the text and the size of its pieces do not matter."""
    whole = events if plain else {**before, "traceEvents": events, "displayTimeUnit": "ms"}
    text = json.dumps(whole, indent=indent, ensure_ascii=False).encode()
    path = tmp_path_factory.getbasetemp() / "t.json"
    path.write_bytes(gzip.compress(text) if packed else text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        assert list(trace_events(path)) == events


def test_truncated_file_yields_the_events_before_the_cut_and_an_error(tmp_path: Path) -> None:
    events = [{"name": "a\u00e9", "ts": 1.5}, {"args": {"x": [1, 2]}}, {}]
    text = json.dumps({"schemaVersion": 1, "traceEvents": events}, ensure_ascii=False).encode()
    path = tmp_path / "t.json"
    for end in range(1, len(text) - 1):  # the last character closes the unread outer object
        path.write_bytes(text[:end])
        found: list[Any] = []
        if end < len(text) - 1 and not text[:end].endswith(b"]"):
            with pytest.raises(TraceError, match=str(path)):
                found.extend(trace_events(path))
        assert found == events[: len(found)]


@pytest.mark.parametrize("end", [b"", b"\n", b",", b" , \n"])
def test_a_list_may_lack_its_end(end: bytes, tmp_path: Path) -> None:
    """The format allows this for programs that are killed; a list inside an object must end."""
    path = tmp_path / "t.json"
    for events in ([], [{"ts": 1}], [{"ts": 1}, {"name": "\u00e9"}]):
        path.write_bytes(json.dumps(events, ensure_ascii=False)[:-1].encode() + (end if events else b""))
        assert list(trace_events(path)) == events
        path.write_bytes(b'{"traceEvents": ' + path.read_bytes())
        with pytest.raises(TraceError, match=f"row {len(events)}: truncated"):
            list(trace_events(path))


@pytest.mark.parametrize("opening", [b"[", b'{"traceEvents": ['])
def test_lenient_mode_keeps_whole_events_of_a_truncated_file(opening: bytes, tmp_path: Path) -> None:
    """A cut within an event or a character counts as truncated; other invalid JSON stays an error."""
    path, begun = tmp_path / "t.json", opening + b'{"ts": 1},'
    event = '{"name": "\u00e9\\n}", "args": {"x": [1, null, -2.5e-7]}}'.encode()
    for end in range(1, len(event)):
        path.write_bytes(begun + event[:end])
        with pytest.raises(TraceError, match="row 1: truncated"):
            list(trace_events(path))
        skipped = Counter[str]()
        assert list(trace_events(path, skipped)) == [{"ts": 1}]
        assert skipped == {"truncated": 1}
    for wrong in (b"]}", b"nonsense}]}", b'{"ts" 1}, {"ts": 2}]}'):
        path.write_bytes(begun + wrong)
        with pytest.raises(TraceError, match="row 1: truncated, or not JSON"):
            list(trace_events(path, Counter()))


def deep(path: Path) -> None:
    path.write_text('{"traceEvents": [' + "[" * 1_000_000)


def endless_text(path: Path) -> None:
    with path.open("w") as file:
        file.write('{"traceEvents": [{"name": "')
        for _ in range(200):
            file.write("x" * (1 << 20))


def endless_space(path: Path) -> None:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"traceEvents": [')
        for _ in range(100):
            file.write(b" " * (1 << 20))


def deep_before(path: Path) -> None:
    path.write_text('{"a":' * 500_000)


@pytest.mark.parametrize("write", [deep, endless_text, endless_space, deep_before])
def test_hostile_files_are_refused_in_bounded_memory(write: Callable[[Path], None], tmp_path: Path) -> None:
    """Files: a million brackets, a text of 200 MB, spaces of 100 MB packed into some kilobytes."""
    path = tmp_path / "t.json"
    write(path)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=str(path)):
            list(trace_events(path))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "neither an object nor a list"),
        (b"hello", "neither an object nor a list"),
        (b'{"a": 1}', "no list 'traceEvents'"),
        (b'{"traceEvents": {}}', "'traceEvents' is no list"),
        (b'{"traceEvents" 1}', "a key without a value"),
        (b'{"traceEvents": [{} {}]}', "row 1: not JSON: no comma"),
        (b'{"traceEvents": [{}, ]}', "row 1: truncated, or not JSON"),
        (b'{"traceEvents": [{"a": 1' + b"0" * 5000 + b"}]}", "row 0: truncated, or not JSON"),
        (b'{"traceEvents": ["\xff"]}', "not UTF-8"),
    ],
)
def test_json_without_a_chrome_trace_is_refused_with_a_reason(
    text: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(text)
    with pytest.raises(TraceError, match=reason) as caught:
        list(trace_events(path))
    assert caught.value.file == str(path)

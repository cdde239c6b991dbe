"""Logs of lines as traces, whole or in pieces, complete or cut."""

from __future__ import annotations

import gzip
import json
import os
import resource
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import traces.formats.logs as module
from traces import EventType, Trace, TraceError
from traces.formats.cupy_hook import iter_cupy_hook, read_cupy_hook
from traces.formats.registry import sniff
from traces.formats.rmm_log import iter_rmm_log, read_rmm_log
from traces.formats.text_files import MAX_LINE_BYTES
from traces.trace import COLUMNS

HEADER = "Thread,Time,Action,Pointer,Size,Stream"
READERS: dict[str, tuple[Callable[..., Trace], Callable[..., Any]]] = {
    "rmm": (read_rmm_log, iter_rmm_log),
    "cupy": (read_cupy_hook, iter_cupy_hook),
}
#: An event of a log: whether it allocates, address, bytes.
Events = list[tuple[bool, int, int]]


@st.composite
def events(draw: st.DrawFn) -> tuple[Events, Events]:
    """Return buffers from before a log and the log's events, none of which contradicts another."""
    before = {address * 512: address for address in draw(st.sets(st.integers(100, 104)))}
    alive, said = dict(before), []
    for address in draw(st.lists(st.integers(1, 104), max_size=30)):
        place = address * 512
        if place in alive:
            said.append((False, place, alive.pop(place)))
        elif address < 100:
            alive[place] = draw(st.integers(1, 512))
            said.append((True, place, alive[place]))
    born = [(True, place, size) for born, place, size in said if not born and place in before]
    return born, said


def text_of(kind: str, said: Events) -> list[str]:
    if kind == "rmm":
        actions = ("free", "allocate")
        rows = [
            f"7,00:00:{at:02}.5,{actions[new]},{place:#x},{size},0"
            for at, (new, place, size) in enumerate(said)
        ]
        return [HEADER, *rows]
    first = '{"hook":"free","device_id":0,"mem_size":0,"mem_ptr":0,"pmem_id":"0x1"}'
    return [first, *(hook_line(new, place, size) for new, place, size in said)]


def hook_line(new: bool, place: int, size: int) -> str:
    event = {"hook": "malloc" if new else "free", "device_id": 0}
    return json.dumps(event | {"mem_size": size, "mem_ptr": place, "pmem_id": "0x7f"}, separators=(",", ":"))


def told(trace: Trace) -> Events:
    """Return the events as a log writes them."""
    born = trace.births
    return [
        (bool(trace.kind[row] == EventType.ALLOC), int(trace.address[born[row]]), int(trace.size[born[row]]))
        for row in range(len(trace))
    ]


def joined(pieces: list[Trace]) -> Trace:
    columns = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in COLUMNS}
    return Trace(**columns, names=(), metadata=pieces[-1].metadata)


@pytest.mark.parametrize("kind", READERS)
@given(data=events(), packed=st.booleans())
@settings(max_examples=60)
def test_written_events_are_read_back(kind: str, data: tuple[Events, Events], packed: bool) -> None:
    """Events of a log keep their order, after the buffers from before the log, with and without gzip."""
    before, said = data
    path = Path(f"{kind}.log")
    text = "\n".join(text_of(kind, said)).encode()
    path.write_bytes(gzip.compress(text) if packed else text)
    trace = READERS[kind][0](path)
    assert sniff(path) == kind
    assert told(trace)[: len(before)] == before
    assert told(trace)[len(before) :] == said
    assert trace.metadata["alive_before"] == str(len(before))


def test_buffers_older_than_the_log_are_born_at_the_start(tmp_path: Path) -> None:
    """The birth is not at the time of the free, which is the only event of the buffer in the log."""
    path = tmp_path / "log"
    path.write_text(f"{HEADER}\n1,00:00:01.5,allocate,0x200,8,0\n1,00:00:09.0,free,0x400,8,0\n")
    assert read_rmm_log(path).time_ns.tolist() == [1_500_000_000, 1_500_000_000, 9_000_000_000]


@pytest.mark.parametrize("kind", READERS)
@given(data=events(), size=st.integers(1, 5))
@settings(max_examples=30)
def test_pieces_join_to_the_whole_trace(kind: str, data: tuple[Events, Events], size: int) -> None:
    """Pieces of any length join to the trace that is read whole, and each piece has its metadata."""
    path = Path(f"{kind}.log")
    path.write_text("\n".join(text_of(kind, data[1])))
    read, pieces_of = READERS[kind]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_EVENTS", size)
        pieces, whole = list(pieces_of(path)), read(path)
    assert all(len(piece) <= size for piece in pieces[1:])
    assert all(piece.metadata == whole.metadata for piece in pieces)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(joined(pieces), name), getattr(whole, name))


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", READERS)
def test_truncated_log_is_read_up_to_the_cut_or_refused(kind: str, tmp_path: Path) -> None:
    """A cut after a line keeps the lines before; within a line, an error may name the line instead."""
    said = [(True, 512, 8), (True, 1024, 16), (False, 512, 8), (True, 4096, 32)]
    text = "".join(f"{line}\n" for line in text_of(kind, said))
    first = text.index("\n")
    path = tmp_path / "log"
    for end in range(first, len(text)):
        path.write_text(text[:end])
        whole = text[: end + 1].count("\n")
        found = outcome(kind, path)
        if isinstance(found, TraceError):
            assert "\n" not in text[end - 1 : end + 1]
            assert (found.file, found.row) == (str(path), whole + 1)
        else:
            assert found == said[: whole - 1]


def outcome(kind: str, path: Path) -> Events | TraceError:
    try:
        return told(READERS[kind][0](path))
    except TraceError as error:
        return error


@pytest.mark.parametrize("kind", READERS)
def test_lenient_mode_skips_and_counts_invalid_lines(kind: str, tmp_path: Path) -> None:
    lines = text_of(kind, [(True, 512, 8), (True, 512, 16), (True, 1024, 2**63), (False, 512, 8)])
    path = tmp_path / "log"
    path.write_bytes("\n".join(lines).encode() + (b'\n{"hook": "\xff' if kind == "cupy" else b"\n\xff"))
    read, pieces_of = READERS[kind]
    for read_it in (read, lambda *a, **b: joined(list(pieces_of(*a, **b)))):
        skipped = Counter[str]()
        assert told(read_it(path, skipped=skipped)) == [(True, 512, 8), (False, 512, 8)]
        assert skipped == {
            "allocated again without a free": 1,
            "not a number from 0 to 2**62": 1,
            "not UTF-8 text": 1,
        }
    with pytest.raises(TraceError, match=r"row 3: allocated again without a free: address 0x200"):
        read(path)


OVER = "allocated over a buffer that is alive"
TWICE = "freed again without an alloc"
FREED_OVER = "freed, but overlaps a buffer that is alive"
MIB = 1 << 20


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.parametrize(
    ("said", "row", "skipped"),
    [
        ([(True, MIB, 5 * MIB), (True, 2 * MIB, 5 * MIB)], 3, {OVER: 1}),
        ([(True, 2 * MIB, 5 * MIB), (True, MIB, 5 * MIB), (False, MIB, 5 * MIB)], 3, {OVER: 1, TWICE: 1}),
        ([(True, 2 * MIB, 5 * MIB), (False, MIB, 5 * MIB)], 3, {FREED_OVER: 1}),
        ([(True, MIB, 8), (False, MIB, 8), (False, MIB, 8)], 4, {TWICE: 1}),
        ([(False, MIB, 8), (False, MIB, 8)], 3, {TWICE: 1}),
    ],
)
def test_overlapping_buffers_are_a_contradiction(
    kind: str, said: Events, row: int, skipped: dict[str, int], tmp_path: Path
) -> None:
    """A second free is one, too; in lenient mode, a refused buffer does not count as older."""
    path = tmp_path / "log"
    path.write_text("\n".join(text_of(kind, said)))
    with pytest.raises(TraceError, match=f"row {row}: {next(iter(skipped))}: address 0x[12]00000"):
        READERS[kind][0](path)
    for read in READERS[kind]:
        found = Counter[str]()
        whole = read(path, skipped=found)
        trace = whole if isinstance(whole, Trace) else joined(list(whole))
        assert told(trace)[-1:] == [(said[row - 3][0], *said[row - 3][1:])]
        assert found == skipped
        trace.validate()


@pytest.mark.parametrize("kind", READERS)
def test_buffers_may_touch_and_reuse_addresses(kind: str, tmp_path: Path) -> None:
    """Empty buffers may lie anywhere, and buffers from before the log may overlap later ones."""
    said = [(True, 512, 512), (True, 1024, 512), (True, 600, 0), (False, 1024, 512), (True, 1000, 0)]
    said += [(True, 1536, 8), (False, 1536, 8), (True, 1100, 4096), (False, 1100, 4096), (False, 1200, 64)]
    path = tmp_path / "log"
    path.write_text("\n".join(text_of(kind, said)))
    assert told(READERS[kind][0](path))[1:] == said


def test_overflow_of_the_load_is_reported_with_the_event(tmp_path: Path) -> None:
    """Each size is possible, the sum is not: the error names the trace's row, not a line."""
    path = tmp_path / "log"
    path.write_text("\n".join(text_of("rmm", [(True, at * 2**62, 2**62) for at in range(2)])))
    with pytest.raises(TraceError, match=r"log: event 1: more than 2\*\*63 bytes are alive"):
        read_rmm_log(path)


def test_event_limit_applies_to_whole_traces_but_not_to_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join(text_of("rmm", [(True, at * 512, 8) for at in range(1, 40)])))
    monkeypatch.setattr(module, "PIECE_EVENTS", 8)
    monkeypatch.setattr(module, "MAX_EVENTS", 30)
    with pytest.raises(TraceError, match="more than 30 events"):
        read_rmm_log(path)
    assert sum(map(len, iter_rmm_log(path))) == 39


@pytest.mark.parametrize("lenient", [False, True])
def test_endless_line_is_refused_in_bounded_memory(tmp_path: Path, lenient: bool) -> None:
    """For a line without end, from a pipe, the reader holds the longest possible line, and no more."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    size = 1 << 28

    def write() -> None:
        with pipe.open("wb") as file:
            try:
                file.write(HEADER.encode() + b"\n")
                for _ in range(size >> 20):
                    file.write(b"1" * (1 << 20))
            except BrokenPipeError:
                pass

    writer = threading.Thread(target=write)
    writer.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    skipped = Counter[str]()
    if lenient:
        assert len(read_rmm_log(pipe, skipped=skipped)) == 0
        assert skipped == {f"a line longer than {MAX_LINE_BYTES} bytes": 1}
    else:
        with pytest.raises(TraceError, match="row 2: a line longer than"):
            read_rmm_log(pipe)
    writer.join()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # KiB


@pytest.mark.parametrize("damage", [slice(0, -9), slice(0, 40)])
def test_damaged_gzip_file_is_reported(tmp_path: Path, damage: slice) -> None:
    path = tmp_path / "log.gz"
    text = "\n".join(text_of("rmm", [(True, at * 512, 8) for at in range(1, 400)]))
    path.write_bytes(gzip.compress(text.encode())[damage])
    with pytest.raises(TraceError, match=f"{path}: not a whole gzip file"):
        read_rmm_log(path)

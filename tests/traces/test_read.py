"""Reading of files of any format, recognised by content, with progress."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from traces import EventType, Trace, TraceError
from traces.formats.parquet import write_trace
from traces.formats.registry import FORMATS, Format, sniff
from traces.read import read, read_pieces
from traces.workload import generate

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import StrPath

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


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("nothing of ours")
    with pytest.raises(TraceError, match="neither a trace"):
        read(tmp_path / "text")


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

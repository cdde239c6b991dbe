"""The native reader of memory snapshots, compared with a simple model."""

from __future__ import annotations

import io
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshot_model import assert_same, model_snapshot
from snapshots import event, segment, snapshot, snapshots

from traces import TraceError
from traces.formats.snapshot import read_snapshot

SHARED = Path(__file__).parents[3] / "shared" / "bench" / "pytorch_snapshots"
SAME_FOLDER = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def dumped(value: Any, protocol: int, *, python: bool) -> bytes:
    """Pickle by the C or the Python pickler, which differ in framing and memoising."""
    if not python:
        return pickle.dumps(value, protocol)
    file = io.BytesIO()
    pickle._Pickler(file, protocol).dump(value)  # type: ignore[attr-defined]
    return file.getvalue()


@given(value=snapshots(), protocol=st.integers(2, 5), python=st.booleans())
@SAME_FOLDER
def test_snapshots_are_read_as_by_the_model(
    tmp_path: Path, value: dict[str, Any], protocol: int, python: bool
) -> None:
    path = tmp_path / "s"
    path.write_bytes(dumped(value, protocol, python=python))
    assert_same(read_snapshot(path), model_snapshot(path))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared snapshots are not here")
@pytest.mark.parametrize("path", sorted(SHARED.glob("*.pickle")), ids=lambda path: path.stem)
def test_real_snapshots_are_read_as_by_the_model(path: Path) -> None:
    assert_same(read_snapshot(path), model_snapshot(path))


def small() -> bytes:
    frames = [
        {"name": "at::_ops::mul::call", "filename": "/a/b.py", "line": 300},
        {"filename": "??", "line": 0},
    ]
    trace = [
        event("segment_alloc", 0, 1 << 21, 1),
        event("alloc", 1 << 21, 70_000, 2, frames=frames),
        event("free_completed", 1 << 40, 5, 3, frames=list(frames)),
    ]
    held = [segment((0, 1024, 1000, "active_allocated"), (1024, 1 << 20, 0, "inactive"))]
    return pickle.dumps(snapshot(trace, segments=held, threshold=0.5, pool=(0, 1), flag=True), 4)


def test_snapshot_cut_anywhere_is_reported_as_truncated(tmp_path: Path) -> None:
    whole, path = small(), tmp_path / "s"
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match="the pickle is truncated"):
            read_snapshot(path)


@pytest.mark.parametrize("python", [False, True])
@pytest.mark.parametrize("devices", [1, 2])
def test_the_lenient_reader_keeps_the_events_before_the_end_of_a_truncated_snapshot(
    tmp_path: Path, devices: int, python: bool
) -> None:
    """The last event, which may be incomplete, and the segments' state at the end are left out."""
    many = [
        event("alloc", 2048 * at, at, at, frames=[{"filename": "a.py", "line": at}]) for at in range(1500)
    ]
    held = [segment((1 << 40, 512, 400, "active_allocated"))]
    whole, path = dumped(snapshot(*[many] * devices, segments=held), 4, python=python), tmp_path / "s"
    most = 0
    for end in [*range(len(whole) // 7, len(whole), len(whole) // 50), *range(len(whole) - 200, len(whole))]:
        path.write_bytes(whole[:end])
        skipped = Counter[str]()
        begun = read_snapshot(path, skipped=skipped)
        assert skipped == {"truncated": 1}
        for device in begun.devices:
            sizes = begun.on_device(device).size.tolist()
            assert sizes == list(range(len(sizes)))
        assert most <= len(begun)
        most = len(begun)
    assert most == 1500 * devices


def test_a_truncated_snapshot_without_events_is_refused_by_the_lenient_reader_too(tmp_path: Path) -> None:
    whole, path = small(), tmp_path / "s"
    for end in range(whole.index(b"device_traces") + 13):
        path.write_bytes(whole[:end])
        with pytest.raises(TraceError, match="the pickle is truncated"):
            read_snapshot(path, skipped=Counter())


@given(data=st.data())
@settings(SAME_FOLDER, max_examples=300)
def test_a_damaged_snapshot_is_read_as_by_the_model_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    whole, path = bytearray(small()), tmp_path / "s"
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    try:
        native = read_snapshot(path)
    except TraceError as error:
        assert error.file == str(path)  # noqa: PT017 - a trace is right, too
    else:
        assert_same(native, model_snapshot(path))

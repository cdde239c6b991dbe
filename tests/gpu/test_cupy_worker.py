"""The measurement of CuPy's allocators, without a GPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import compare_cupy
import cupy_allocators
import cupy_worker
import pytest
from cupy_allocators import Allocator, SkippedError
from cupy_standin import Standin
from cupy_workloads import WORKLOADS

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20


class FakeCard:
    """A card whose free bytes are told."""

    def __init__(self, *free_bytes: int) -> None:
        self.left, self.waits = list(free_bytes), 0

    def free_bytes(self) -> int:
        return self.left.pop(0)

    def synchronize(self) -> None:
        self.waits += 1


class Counting:
    """A workload that counts its steps."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def step(self, number: int) -> None:
        self.steps.append(number)

    def result(self) -> str:
        return ",".join(map(str, self.steps))


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Standin:
    for name, kind in WORKLOADS.items():
        monkeypatch.setitem(WORKLOADS, name, kind._replace(steps=4, timed=2))
    return Standin(monkeypatch, 128 * MIB)


def test_memory_is_measured_between_untimed_steps() -> None:
    card, steps = FakeCard(100, 60, 40, 90), []
    allocator = Allocator(
        lambda: 7, lambda: steps.append("step"), lambda: steps.append("wait"), lambda: {"a": 1}
    )
    told = cupy_worker.measure(Counting, 5, 3, allocator, card)
    assert told.pop("ms_per_step") >= 0
    assert told == {
        "reserved_bytes": 7,
        "used_bytes": 10,
        "used_peak_bytes": 60,
        "result": "0,1,2,3,4",
        "a": 1,
    }
    assert steps == ["step", "step", "wait", "step", "step", "step"]
    assert (card.left, card.waits) == ([], 4)


def test_sizes_are_measured_in_turns() -> None:
    asked: list[int] = []
    told = cupy_worker.alloc_and_free_ns(asked.append, Allocator(lambda: 0), rounds=8, times=2)
    assert list(told) == ["1 KiB", "1 MiB", "64 MiB"]
    assert asked == [1 << 10, 1 << 10, 1 << 20, 1 << 20, 1 << 26, 1 << 26] * 8


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_is_measured(name: str, standin: Standin) -> None:
    rows = {way: cupy_worker.main(way, name) for way in ("cupy", "mempool managed")}
    assert rows["cupy"]["result"] == rows["mempool managed"]["result"]
    assert rows["cupy"]["reserved_bytes"] == MIB
    assert rows["cupy"]["budget_bytes"] == 32 * MIB
    assert rows["mempool managed"]["hit_rate"] == 1.0
    assert standin.options["memory"] == "managed"
    assert standin.options["max_reserved"] < 128 * MIB, "more than is free"
    assert standin.pool.calls == ["step", "step", "wait", "step", "step"]
    for row in json.loads(json.dumps(rows)).values():
        assert len(compare_cupy.cells(row, 5 * MIB)) == len(compare_cupy.COLUMNS) - 1


def test_alloc_and_free_is_measured(standin: Standin) -> None:
    row = cupy_worker.main("mempool", "alloc+free")
    assert list(row["ns"]) == list(cupy_worker.SIZES)
    assert standin.pool.calls.count("malloc") == 12 * 3 * 3000
    assert len(compare_cupy.ns_cells(row)) == 4


@pytest.mark.parametrize(
    ("way", "why"), [("async", "no such pool"), ("rmm pool", "RMM"), ("rmm arena", "RMM")]
)
def test_unavailable_allocators_are_skipped(
    way: str, why: str, standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rmm", None)
    row = cupy_worker.main(way, "solver")
    assert why in row["skipped"]
    assert compare_cupy.cells(row, None) == [f"skipped: {row['skipped']}"]
    with pytest.raises(SkippedError):
        cupy_allocators.serve(way, MIB)


def test_live_bytes_are_counted() -> None:
    memory = pytest.importorskip("cupy").cuda
    load = cupy_allocators.Load(
        lambda size: memory.MemoryPointer(memory.UnownedMemory(1 << 20, size, None, 0), 0)
    )
    first, second = load.malloc(100), load.malloc(0)
    third = load.malloc(50)
    assert (first.ptr, first.device_id, load.live_bytes, load.peak_bytes) == (1 << 20, 0, 150, 150)
    view = first + 10
    del first, third
    assert load.live_bytes == 100, "a view keeps it"
    del view, second
    assert (load.live_bytes, load.peak_bytes) == (0, 150)


def _main(monkeypatch: pytest.MonkeyPatch, arguments: list[str], **answers: Any) -> int:
    """The comparison with these answers of its workers: by way, or by check."""

    def told(script: str, *names: str, seconds: float) -> tuple[str, str]:
        if script == "cupy_checks.py":
            answer: tuple[str, str] = answers.get(names[0], ("holds", ""))
            return answer
        row = {"ns": {"1 KiB": 5.0}} if names[1] == "alloc+free" else ROW
        return json.dumps(row | answers.get(names[0], {})), ""

    monkeypatch.setattr(compare_cupy, "told", told)
    monkeypatch.setattr(compare_cupy, "why_not", lambda _: None)
    monkeypatch.setattr(compare_cupy, "machine", lambda: {"gpu": "none"})
    monkeypatch.setattr(sys, "argv", ["compare_cupy.py", *arguments])
    return compare_cupy.main()


ROW = {"ms_per_step": 1.0, "reserved_bytes": 2, "used_bytes": 2, "used_peak_bytes": 3, "result": "abc"}


def test_all_rows_are_printed_and_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert _main(monkeypatch, ["--json", str(tmp_path / "all.json")]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*compare_cupy.NAMES, *compare_cupy.WAYS, *compare_cupy.CHECKS))
    results = json.loads((tmp_path / "all.json").read_text())
    assert set(results) == {"machine", "checks", "alloc+free", *compare_cupy.NAMES}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"mempool": {"result": "other"}}, "the results differ"),
        ({"mempool": {"error": "it crashed"}}, "mempool: it crashed"),
        ({"streams": ("", "overwritten")}, "streams: overwritten"),
    ],
)
def test_wrong_results_end_with_exit_code_1(
    answers: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main(monkeypatch, [], **answers) == 1
    assert said in capsys.readouterr().err


def test_a_skipped_allocator_or_check_is_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped = {"rmm pool": {"skipped": "not here"}}
    assert _main(monkeypatch, [], **skipped, two_devices=("skipped: there is one device", "")) == 0


def test_no_row_begins_after_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_cupy, "IN_ALL_SECONDS", 1)
    assert compare_cupy.Clock().row("cupy", "solver") == {"error": "not run: the time is over"}


def test_names_cover_all_workloads_and_allocators() -> None:
    assert list(WORKLOADS) == list(compare_cupy.NAMES)
    assert list(cupy_allocators.WAYS) == ["load", *compare_cupy.WAYS]


def test_names_cover_all_checks() -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("mempool.cupy")
    import cupy_checks

    assert list(cupy_checks.CHECKS) == list(compare_cupy.CHECKS)

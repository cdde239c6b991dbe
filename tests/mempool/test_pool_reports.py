"""Settings, errors, reports and explanations of a pool."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
from pools import run, simulated

from mempool import Pool, UsageError
from mempool.reporting.metrics import NOTHING
from traces.formats.parquet import read_trace


def test_argument_overrides_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPOOL_MAX_RESERVED", "8GiB")
    monkeypatch.setenv("MEMPOOL", "record")
    with Pool(simulated(), background=False) as pool:
        assert pool.settings.max_reserved == 8 << 30
        assert pool.settings.mode == "record"
    with Pool(simulated(), background=False, max_reserved="1e6", mode="off") as pool:
        assert pool.settings.max_reserved == 1_000_000
        assert pool.state == "off"


@pytest.mark.parametrize(
    "options",
    [
        {"small_bytes": -1},
        {"small_bytes": 1025},
        {"small_bytes": True},
        {"small_bytes": 8.0},
        {"small_bytes": "8"},
        {"mode": "fast"},
        {"mode": 1},
        {"mode": ["off"]},
        {"max_reserved": "8 bananas"},
        {"max_reserved": True},
        {"max_reserved": 0},
        {"max_reserved": 0.5},
        {"max_reserved": float("nan")},
        {"max_reserved": 1 << 64},
        {"max_reserved": []},
        {"plan": ""},
        {"plan": 3},
        {"record": ""},
        {"record": True},
        {"check": 1},
        {"explain": "yes"},
        {"background": 0.0},
        {"colour": 1},
    ],
    ids=str,
)
def test_invalid_settings_are_refused_in_a_single_line(options: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        Pool(simulated(), **{"background": False, **options})
    assert "\n" not in str(caught.value)


def test_unwritable_trace_is_named_in_the_error(tmp_path: Path) -> None:
    path = str(tmp_path / "nowhere" / "x")
    with pytest.raises(FileNotFoundError) as caught:
        Pool(simulated(), background=False, record=path)
    assert caught.value.filename == path


@pytest.mark.parametrize("marks", [True, False])
def test_metrics_count_steps_where_marked_and_periods_elsewhere(pool: Pool, marks: bool) -> None:
    none = pool.metrics()
    assert none == NOTHING | {"state": "recording"}
    run(pool, programs.replaced(programs.Watched(pool)), 20, marks=marks)
    metrics, values = pool.metrics(), pool.report().to_dict()
    assert {key: type(value) for key, value in metrics.items()} == {k: type(v) for k, v in none.items()}
    assert (metrics["steps"] > 0, metrics["periods"] > 0) == (marks, not marks)
    assert 1 < metrics["planned_from"] < 20
    assert metrics["planned_bytes"] == values["planned_arena_bytes"] <= metrics["reserved_bytes"]
    assert metrics["hits"] == values["hits"]
    assert metrics["hit_rate"] == values["hit_rate"] == 1


def never_twice(number: int) -> list[int]:
    return [100_000 + 4096 * (number * 7 + k) for k in range(5)]


@pytest.mark.parametrize(
    ("options", "sizes", "steps", "verdict"),
    [
        (
            {},
            lambda _: [50_000, 70_000],
            12,
            "planned from step 5 of 12; 100.0 % of requests at their planned",
        ),
        ({}, lambda _: [50_000, 70_000], 1, "no plan after 1 step: it takes about 5 steps that are alike"),
        ({}, never_twice, 12, "no plan after 12 steps: no step made the requests of an earlier one"),
        ({}, lambda _: [50_000], 0, "no plan: nothing was seen to repeat; in a loop"),
        (
            {"mode": "record"},
            lambda _: [50_000],
            9,
            "no plan after 9 steps: none was asked for (MEMPOOL=record)",
        ),
    ],
)
def test_verdict_names_the_plan_or_why_there_is_none(
    options: dict[str, Any], sizes: Callable[[int], list[int]], steps: int, verdict: str
) -> None:
    with Pool(simulated(), background=False, **options) as pool:
        for number in range(steps or 1):
            for address in [pool.allocate(size) for size in sizes(number)]:
                pool.free(address)
            if steps:
                pool.step()
            pool.plan_now()
        said = pool.report().verdict
    assert said.startswith(f"pool: {verdict}")
    assert "; live at most " in said
    assert ", reserved at most " in said


def test_later_plan_hides_no_miss_of_an_earlier_plan(pool: Pool) -> None:
    """The steady state begins with the first plan; the latest plan's counts are reported beside."""
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory), 10, marks=True)
    early = pool.report()
    assert early.values["misses"] == 0
    run(pool, lambda _: programs.layers(memory, scale=4096), 20, marks=True, first=10)
    late = pool.report().to_dict()
    assert late["plan_active_at_iteration"] == early.values["plan_active_at_iteration"]
    assert late["latest_plan_active_at_iteration"] > 11
    assert late["latest_plan_misses"] == 0
    assert late["misses"] == late["misses_total"] == sum(late["misses_by_reason"].values()) >= 60
    assert late["hit_rate"] == late["hits"] / (late["hits"] + late["misses"]) < 1
    said = dict(pool.report().rows())
    assert said["misses by reason"].startswith("size_mismatch ")
    assert "the others mostly as desynchronized: the program" in pool.report().verdict


def test_hits_are_reported_after_the_last_plan_was_dropped(pool: Pool) -> None:
    """An example: the program ends with other work, whose allocations miss."""
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory), 10, marks=True)
    before = pool.report().to_dict()
    pool.client.drop_patterns()
    assert pool.report().to_dict()["hit_rate"] == before["hit_rate"] == 1
    memory.free(memory.allocate(54_321))
    after = pool.report().to_dict()
    assert after["plan_active_at_iteration"] == before["plan_active_at_iteration"]
    assert after["hits"] == after["hits_total"] == before["hits"] > 0
    assert after["misses_by_reason"] | {"unplanned": 0} == before["misses_by_reason"]
    assert after["misses"] == after["misses_by_reason"]["unplanned"] == 1
    assert after["misses_total"] == before["misses_total"] == 0


def test_misses_are_explained_with_sizes_and_a_remedy(pool: Pool) -> None:
    memory = programs.Watched(pool)
    run(pool, lambda _: programs.layers(memory), 10, marks=True)
    memory.free(memory.allocate(12_345))
    text = pool.explain()
    assert "got 12,345 B" in text
    assert "past_end: more allocations than the recorded iteration" in text


def test_closed_pool_reports_its_state_even_while_its_plan_is_in_effect(pool: Pool) -> None:
    run(pool, programs.replaced(programs.Watched(pool)), 10, marks=True)
    assert pool.state == "replaying"
    pool.close()
    assert pool.state == "closed"


def test_unclosed_dropped_pool_ends_its_threads_and_frees_its_memory() -> None:
    script = """
import gc, os, sys, threading, time
from mempool import Pool, _core

class Slow:  # what the interpreter ends while threads still wait for work
    def __del__(self, sleep=time.sleep): sleep(0.5)

for _ in range(5):
    pool = Pool()
    pool.free(pool.allocate(5000))
    device = pool.device
    del pool
gc.collect()
until = time.monotonic() + 60
while threading.active_count() > 1 and time.monotonic() < until: time.sleep(0.01)
print(threading.active_count())
recording = Pool(record="t.trace")
recording.free(recording.allocate(5000))
del recording
sys.slow = Slow()
last = Pool()
del last
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert len(read_trace("t.trace")) == 2


def test_waiting_thread_at_the_end_of_the_interpreter_is_left_alone() -> None:
    """For example when `close` gave up waiting for a long solve."""
    script = """
import sys, threading, time
from mempool import _core

class Slow:
    def __del__(self, sleep=time.sleep): sleep(0.5)

client = _core.Client(_core.Pool(device=_core.HostDevice()), "test")
def wait():
    while True: client.wait_for_work(0.2)
threading.Thread(target=wait, daemon=True).start()
time.sleep(0.1)
sys.slow = Slow()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")

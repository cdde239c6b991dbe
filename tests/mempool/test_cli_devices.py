"""Traces of several devices: each has addresses, a peak and a plan of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from answers import answer as said

from mempool.cli.app import call
from solvers import read_plan
from traces import EventType, Trace
from traces.formats.parquet import write_trace
from traces.trace import COLUMNS
from traces.workload import generate

if TYPE_CHECKING:
    from pathlib import Path


def doubled(one: Trace, second: int) -> Trace:
    """The same on two devices, event by event; the second one's buffers are half as large."""
    table = {name: np.repeat(getattr(one, name), 2) for name in COLUMNS}
    other = np.arange(2 * len(one)) % 2 == 1
    of_buffer = table["kind"] != EventType.MARK
    table["device"] = np.where(other, second, 0).astype(np.int32)
    table["buffer"] = np.where(of_buffer, 2 * table["buffer"] + other, -1)
    table["size"] = np.where(other, table["size"] // 2, table["size"])
    keep = of_buffer | ~other
    return Trace.of(**{name: values[keep] for name, values in table.items()}, names=one.names)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    monkeypatch.chdir(tmp_path)
    made = generate(60, 1)
    write_trace(made, "one.trace")
    write_trace(doubled(made, 3), "two.trace")
    write_trace(doubled(made, -1), "host.trace")
    return made


@pytest.mark.parametrize("whole", [(), ("--whole",)])
def test_plan_of_a_device_equals_the_plan_of_its_own_trace(
    one: Trace, whole: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    alone = said(capsys, "plan", "one.trace", "-o", "one.plan", *whole)
    planned = said(capsys, "plan", "two.trace", "--device", "0", "-o", "two.plan", *whole)
    for key in ("arena_bytes", "peak_load_bytes", "buffers", "period", "iterations"):
        assert planned[key] == alone[key]
    assert (read_plan("two.plan")[1].size == read_plan("one.plan")[1].size).all()
    assert said(capsys, "check", "two.plan", "two.trace", "--device", "0")["ok"]
    assert call(["check", "two.plan", "two.trace", "--device", "3"]) == 1


def test_several_devices_without_a_choice_are_refused(one: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    """One line names the devices and the option, before anything is written."""
    assert call(["plan", "one.trace", "-o", "one.plan"]) == 0
    for command in (["plan", "two.trace", "-o", "two.plan"], ["check", "one.plan", "two.trace"]):
        capsys.readouterr()
        assert call(command) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "two.trace is of several devices: 0, 3; choose one with --device" in error
    for verb in ("plan", "info"):
        assert call([verb, "two.trace", "--device", "1"]) == 2
        assert "has no device 1, but 0, 3" in capsys.readouterr().err
    assert call(["info", "one.plan", "--device", "0"]) == 2
    assert "a plan, which has no devices" in capsys.readouterr().err


def test_info_shows_the_device_with_the_largest_peak_load_and_where_all_go(
    one: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    alone, both = said(capsys, "info", "one.trace"), said(capsys, "info", "two.trace")
    for key in ("peak_load_bytes", "lower_bound_bytes", "buffers", "period", "iterations"):
        assert both[key] == alone[key]
    assert (alone["device"], both["device"], both["devices"]) == (0, 0, 2)
    assert both["allocs"] == 2 * alone["allocs"]
    assert [device["device"] for device in both["per_device"]] == [0, 3]
    assert both["per_device"][0]["roles"] == alone["per_device"][0]["roles"]
    host = said(capsys, "info", "host.trace", "--device", "-1")
    assert (host["device"], host["buffers"]) == (-1, alone["buffers"])
    assert [device["device"] for device in host["per_device"]] == [-1]
    assert call(["info", "two.trace"]) == 0
    assert "0; what follows is of it alone" in capsys.readouterr().out


def test_event_numbers_are_rows_of_the_file(one: Trace, capsys: pytest.CaptureFixture[str]) -> None:
    """Events of the peak, and of the buffers held longest."""
    two = doubled(one, 3)
    for device in said(capsys, "info", "two.trace")["per_device"]:
        load = np.where((two.device == device["device"]) & (two.kind == EventType.ALLOC), two.size, 0)
        frees = np.flatnonzero((two.device == device["device"]) & (two.kind == EventType.FREE))
        load[frees] = -two.size[two.births[frees]]
        assert device["peak_event"] == np.cumsum(load).argmax()
        for held in device["held_longest"]:
            assert two.buffer[held["start"]] == held["buffer"]
            assert held["end"] == len(two) or two.buffer[held["end"]] == held["buffer"]

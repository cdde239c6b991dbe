"""Pages in a browser: owners, stacks, notes and links."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pages import visible, window
from shown import four_buffers

from mempool.show import figure
from traces import Buffers, EventType, Trace
from traces.trace import RANGE_BEGIN, RANGE_END

pytestmark = pytest.mark.browser
KIB = 1024


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    """Four buffers of the modules up (0 and 2) and none (1 and 3), and of three categories."""
    names = (*four_buffers().names, "up", "weights", "(unknown)")
    module = [8, -1, -1, 8, -1, -1, -1, -1]
    category = [9, 9, -1, 10, -1, -1, -1, -1]
    trace = four_buffers(names=names, module=module, category=category)
    return visit(figure(trace, frames=True).html())


def rows(page: Any) -> list[str]:
    """The first cells of the table."""
    return [row.split("\t")[0].strip() for row in page.locator("#composition tbody tr").all_inner_texts()]


def found(page: Any) -> list[int]:
    said: list[int] = page.evaluate(
        "Array.from(mempoolShow.matches ?? []).flatMap((yes, row) => yes ? [row] : [])"
    )
    return said


def test_every_owner_grouping_is_selectable(page: Any) -> None:
    kinds = ["category", "frame", "module", "operation", "stream", "size", "buffer"]
    assert page.locator("#by option").all_inner_texts() == kinds
    tables = {
        "category": ["(unknown)", "weights", "(unknown)"],
        "frame": ["three.py:3", "two.py:2", "four.py:4", "one.py:1"],
        "module": ["up", "(unknown)"],
        "operation": ["three", "two", "four", "one"],
        "stream": ["0", "7"],
        "size": ["400.00 KiB (409,600 B)", "200.00 KiB (204,800 B)", "100.00 KiB (102,400 B)"],
        "buffer": ["#2 three", "#1 two", "#3 four", "#0 one"],
    }
    for kind, expected in tables.items():
        page.select_option("#by", kind)
        assert rows(page) == expected
        assert page.locator("#what").inner_text() == kind


def test_click_on_a_row_finds_its_buffers(page: Any) -> None:
    for kind, row, expected in [
        ("module", 0, [0, 2]),
        ("module", 1, [1, 3]),
        ("buffer", 1, [1]),
        ("size", 2, [0, 3]),
    ]:
        page.select_option("#by", kind)
        page.locator("#composition tbody tr button").nth(row).click()
        assert found(page) == expected
        assert page.locator("#found").inner_text().startswith(f"{len(expected)} buffer")
    page.focus("#figure")
    page.keyboard.press("Escape")
    assert (found(page), page.locator("#search").input_value()) == ([], "")


@pytest.mark.parametrize("name", ["<b>", "a=b", " spaced ", "#1", "=4MiB", "x" * 1000])
def test_row_of_any_name_finds_its_buffers(visit: Callable[..., Any], name: str) -> None:
    trace = Trace.of([0, 0], [0, 1], [5, 6], operation=[0, 1], names=(name, f"more {name}"))
    page = visit(figure(trace).html())
    page.locator("#composition tbody tr button").nth(1).click()
    assert found(page) == [0]


def test_pixel_column_shows_its_highest_moment(visit: Callable[..., Any]) -> None:
    """A single event with a GiB is visible, although each pixel covers some hundred events."""
    start = np.arange(100_000)
    size = np.full(100_000, 1000)
    start[60_000], size[60_000] = 60_000, 1 << 30
    stacked = visit(figure(Buffers.of(start, start + 1, size)).html())
    assert 60_000 in visible(stacked)
    assert stacked.evaluate("Math.max(...mempoolShow.drawn.moments)") >= 99_990


MIB = 1 << 20


A, F, MARK, RESERVE, REFUSED = (
    EventType.ALLOC,
    EventType.FREE,
    EventType.MARK,
    EventType.RESERVE,
    EventType.REFUSED,
)


@pytest.fixture
def notes(visit: Callable[..., Any]) -> Any:
    """A page of a step with a forward pass of two layers, the second of which runs out of memory."""
    trace = Trace.of(
        [MARK, MARK, A, MARK, MARK, A, REFUSED, MARK, MARK, MARK, F],
        [-1, -1, 0, -1, -1, 1, -1, -1, -1, -1, 0],
        [0, 0, 4 * MIB, 0, 0, 8 * MIB, 6 * MIB, 0, 0, 0, 0],
        operation=[2, 3, -1, 3, 3, -1, -1, 3, 2, 4, -1],
        category=[0, 0, -1, 1, 0, -1, -1, 1, 1, -1, -1],
        stack=[-1, -1, 5, -1, -1, 6, 7, -1, -1, -1, -1],
        names=(
            RANGE_BEGIN, RANGE_END, "forward", "layer", "step", "linear.py:3 forward\ntrain.py:9 step",
            "\n".join(f"deep.py:{k} f" for k in range(60)), "attention.py:42 scores\ntrain.py:9 step",
        ),
        metadata={"refused.device_free": str(MIB)},
    )  # fmt: skip
    return visit(figure(trace, frames=True, title="died").html())


def test_refused_request_is_listed_drawn_and_reached_by_a_click(notes: Any) -> None:
    """Both pictures have a line from the live bytes upwards by the requested bytes."""
    assert "out of memory: 1 request refused, the largest 6.00 MiB" in notes.locator("#facts").inner_text()
    said = notes.locator("#refused li").first.inner_text()
    assert said.startswith("6.00 MiB at 6, 1.00 MiB free on the device, asked for by attention.py:42 scores")
    line = {"time": [6], "low": [12 * MIB], "high": [18 * MIB]}
    assert notes.evaluate("mempoolShow.models.refused.data") == line
    assert notes.evaluate("mempoolShow.models.refused_below.data") == line
    assert notes.evaluate("mempoolShow.models.refused_label.data.text") == ["out of memory: 6.00 MiB refused"]
    assert notes.evaluate("mempoolShow.models.load.y_range.end") >= 18 * MIB
    notes.locator("#refused summary").click()
    assert notes.locator("#refused ol li").all_inner_texts() == ["attention.py:42 scores", "train.py:9 step"]
    notes.locator("#refused button").click()
    assert notes.evaluate("mempoolShow.time") == 6
    assert window(notes)["left"] < 6 < window(notes)["right"]

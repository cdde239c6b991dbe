"""Refused requests, ranges, stacks and missing history in a browser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pages import place, resting, tooltip, visible, window

from mempool.show import figure
from traces import EventType, Trace
from traces.trace import RANGE_BEGIN, RANGE_END

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.browser

A, F, MARK, RESERVE, REFUSED = (
    EventType.ALLOC,
    EventType.FREE,
    EventType.MARK,
    EventType.RESERVE,
    EventType.REFUSED,
)
MIB = 1 << 20


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    """A page of a step with a forward of two layers, the second of which runs out of memory."""
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


def on_strip(page: Any, time: float, row: float) -> tuple[float, float]:
    """Return the screen position of a time and a row of the strip."""
    x, y = page.evaluate(
        """([time, row]) => {
          const view = Bokeh.index.find_one_by_id(mempoolShow.models.strip.id)
          const box = view.canvas_view.el.getBoundingClientRect()
          return [box.left + view.frame.x_scale.compute(time), box.top + view.frame.y_scale.compute(row)]
        }""",
        [time, row],
    )
    return x, y


def test_refused_request_is_listed_drawn_and_reached_by_a_click(page: Any) -> None:
    """A line from the live bytes upwards by the requested bytes, in either picture."""
    assert "out of memory: 1 request refused, the largest 6.00 MiB" in page.locator("#facts").inner_text()
    said = page.locator("#refused li").first.inner_text()
    assert said.startswith("6.00 MiB at 6, 1.00 MiB free on the device, asked for by attention.py:42 scores")
    line = {"time": [6], "low": [12 * MIB], "high": [18 * MIB]}
    assert page.evaluate("mempoolShow.models.refused.data") == line
    assert page.evaluate("mempoolShow.models.refused_below.data") == line
    assert page.evaluate("mempoolShow.models.refused_label.data.text") == ["out of memory: 6.00 MiB refused"]
    assert page.evaluate("mempoolShow.models.load.y_range.end") >= 18 * MIB
    page.locator("#refused summary").click()
    assert page.locator("#refused ol li").all_inner_texts() == ["attention.py:42 scores", "train.py:9 step"]
    page.locator("#refused button").click()
    assert page.evaluate("mempoolShow.time") == 6
    assert window(page)["left"] < 6 < window(page)["right"]


def test_request_for_far_too_much_leaves_the_load_in_sight(visit: Callable[..., Any]) -> None:
    trace = Trace.of([A, REFUSED], [0, -1], [MIB, 1 << 50])
    page = visit(figure(trace).html())
    assert page.evaluate("mempoolShow.models.load.y_range.end") < 3 * MIB
    assert page.evaluate("mempoolShow.models.addresses.y_range.end") < 3 * MIB


def test_reserved_memory_far_above_the_load_leaves_the_stack_in_sight(visit: Callable[..., Any]) -> None:
    for held, top in ((2 * MIB, MIB), (1.25 * MIB, 1.25 * MIB)):
        trace = Trace.of([RESERVE, A], [-1, 0], [int(held), MIB], address=[0, 0])
        page = visit(figure(trace).html())
        assert page.evaluate("mempoolShow.models.addresses.y_range.end") == pytest.approx(1.02 * top)


def test_ranges_and_marks_are_a_strip(page: Any) -> None:
    """Ranges are drawn by depth with their names, marks above."""
    data = page.evaluate("mempoolShow.models.ranges.data")
    assert list(zip(data["left"], data["right"], strict=True)) == [(0, 8), (1, 3), (4, 7)]
    texts = page.evaluate("mempoolShow.models.named.data_source.data.text")
    assert texts == ["forward", "layer", "layer", "step"]
    page.mouse.move(*on_strip(page, 5, -1.5))
    assert (tooltip(page) or "").splitlines() == ["range layer", "time 4 to 7"]
    page.mouse.move(*on_strip(page, 9, 0.5))
    assert (tooltip(page) or "").splitlines() == ["mark step", "at 9"]
    page.mouse.click(*on_strip(page, 5, -1.5))
    resting(page)
    assert (window(page)["left"], window(page)["right"]) == (4, 7)


def test_stack_of_a_buffer_is_shown_whole(page: Any) -> None:
    page.mouse.move(*place(page, 4.5, 2 * MIB))
    lines = (tooltip(page) or "").splitlines()
    assert lines[-2:] == ["stack linear.py:3 forward", "train.py:9 step"]
    page.mouse.click(*place(page, 8, 9 * MIB))
    assert "more lines: click for all" in (tooltip(page) or "")
    said = page.locator("#chosen").inner_text()
    assert all(f"deep.py:{k} f" in said for k in range(60))


def test_page_without_a_history_draws_no_time(visit: Callable[..., Any]) -> None:
    trace = Trace.of(
        [RESERVE, A, A], [-1, 0, 1], [1000, 100, 200], address=[0, 0, 500], operation=[-1, 0, 1],
        names=("one", "two"), metadata={"history.0": "absent", "live_before.0": "300"},
    )  # fmt: skip
    page = visit(figure(trace, title="end").html())
    assert page.locator("h1").inner_text() == "end · state at the end"
    assert page.locator("#facts").inner_text() == "2 buffers · alive 300 B · reserved 1000 B"
    assert "only the state at the end is known" in page.locator("#caveats").inner_text()
    assert not page.evaluate("mempoolShow.models.load.visible")
    assert page.locator("#alive").inner_text() == "Alive at the end: 300 B"
    for picture, high in (("#addresses", 600), ("#stacked", 200)):
        page.click(picture)
        assert visible(page) == [0, 1]
        middle = page.evaluate("(mempoolShow.first + mempoolShow.last) / 2")
        page.mouse.click(*place(page, middle, high))
        assert "buffer #1" in (tooltip(page) or "")
        assert "lifetime" not in (tooltip(page) or "")
        assert page.locator("#alive").inner_text() == "Alive at the end: 300 B"
    assert page.locator("#peak").is_disabled()
    page.focus("#figure")
    page.keyboard.press("ArrowLeft")
    resting(page)
    page.mouse.click(*place(page, page.evaluate("mempoolShow.first") - 0.1, 100))
    assert page.locator("#alive").inner_text() == "Alive at the end: 300 B"

"""The page in a browser: drawing, the effects of pointer and keys, and self-containment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pages import place, resting, tooltip, visible, window
from shown import four_buffers

from mempool.show import figure
from traces import Trace

pytestmark = pytest.mark.browser

KIB = 1024


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    page = visit(figure(four_buffers(), frames=True, title="four").html())
    page.click("#addresses")
    return page


def test_page_shows_the_rectangles_peak_composition_and_facts_of_the_trace(page: Any) -> None:
    assert visible(page) == [0, 1, 2, 3]
    rectangles = page.evaluate("mempoolShow.models.large.data")
    drawn = sorted(zip(*(rectangles[k] for k in ("row", "left", "right", "bottom", "top")), strict=True))
    assert drawn == [
        (0, 0, 2, 0, 100 * KIB),
        (1, 1, 5, 100 * KIB, 300 * KIB),
        (2, 3, 6, 300 * KIB, 700 * KIB),
        (3, 4, 7, 0, 100 * KIB),
    ]
    assert page.evaluate("mempoolShow.models.peak.data.time[0]") == 4
    assert page.evaluate("mempoolShow.models.peak.data.text[0]") == "peak 700.00 KiB"
    assert page.title() == page.locator("h1").inner_text() == "four"
    assert "4 lifetimes · peak load 700.00 KiB" in page.locator("#facts").inner_text()
    rows = page.locator("#composition tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["three.py:3", "two.py:2", "four.py:4", "one.py:1"]
    assert rows[0].split("\t")[1:3] == ["1", "400.00 KiB"]


def test_tooltip_describes_the_rectangle_under_the_pointer(page: Any) -> None:
    page.mouse.move(*place(page, 4.5, 500 * KIB))
    said = tooltip(page)
    assert said is not None
    assert said.splitlines() == [
        "buffer #2",
        "size 400.00 KiB (409,600 B)",
        "lifetime 3 to 6, 3 events, about 3.00 ms",
        "operation three",
        "frame three.py:3",
        "stream 0",
        "address 0x1000004b000",
    ]
    page.mouse.move(*place(page, 0.5, 600 * KIB))
    assert tooltip(page) is None


def test_wheel_zooms_about_the_pointer(page: Any) -> None:
    x, y = place(page, 3.5, 500 * KIB)
    page.mouse.move(x, y)
    for _ in range(4):
        page.mouse.wheel(0, -240)
    resting(page)
    now = window(page)
    assert 3 < now["left"] < 3.5 < now["right"] < 4
    assert place(page, 3.5, 500 * KIB) == pytest.approx((x, y), abs=20)  # 20 times a whole pixel
    assert visible(page) == [2]


def test_range_brushed_in_the_load_becomes_the_window(page: Any) -> None:
    page.evaluate("mempoolShow.models.addresses.x_range.setv({start: 6, end: 7})")
    box = page.evaluate(
        """() => { const view = Bokeh.index.find_one_by_id(mempoolShow.models.load.id)
          const box = view.canvas_view.el.getBoundingClientRect()
          const at = (time) => box.left + view.frame.x_scale.compute(time)
          return [at(0.2), at(0.8), box.top + 60] }"""
    )
    page.mouse.move(box[0], box[2])
    page.mouse.down()
    page.mouse.move(box[1], box[2], steps=8)
    page.mouse.up()
    resting(page)
    now = window(page)
    assert (now["left"], now["right"]) == pytest.approx((0.2, 0.8), abs=0.05)
    assert visible(page) == [0]


SEARCHES = {
    "THREE": [2],
    "#1": [1],
    "four.py": [3],
    "=100k": [0, 3],
    ">=200 KiB": [1, 2],
    "< 0.1MiB": [0, 3],
    "no such thing": [],
}


def test_search_finds_operations_frames_rows_and_sizes(page: Any) -> None:
    """Matches keep their colour, other buffers lose theirs."""
    for wanted, rows in SEARCHES.items():
        page.fill("#search", wanted)
        found = page.evaluate("Array.from(mempoolShow.matches).flatMap((yes, row) => yes ? [row] : [])")
        assert found == rows
        assert (
            page.locator("#found")
            .inner_text()
            .startswith(f"{len(rows)} buffer{'s' if len(rows) != 1 else ''} of ")
        )
        dim = page.evaluate("mempoolShow.palette.css.at(-1)")
        large = page.evaluate("mempoolShow.models.large.data")
        bright = {row for row, colour in zip(large["row"], large["colour"], strict=True) if colour != dim}
        assert bright == set(rows)


def test_every_control_is_reached_by_keys(visit: Callable[..., Any]) -> None:
    page = visit(figure(four_buffers()).html())
    controls = ["stacked", "addresses", "by", "together", "search", "previous", "next", "in", "out", "whole"]
    controls += ["peak", "theme", "figure"]
    seen = []
    for _ in controls:
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert seen == controls
    page.focus("#figure")
    before = window(page)
    page.keyboard.press("+")
    assert window(page)["right"] - window(page)["left"] < before["right"] - before["left"]
    page.keyboard.press("0")
    assert window(page) == pytest.approx(before)
    page.keyboard.press("ArrowRight")
    assert window(page)["left"] > before["left"]
    page.keyboard.press("n")
    assert "#0" in page.locator("#chosen").inner_text()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "search"


def test_click_shows_the_composition_at_a_moment(page: Any) -> None:
    page.mouse.click(*place(page, 1.5, 200 * KIB))
    assert page.locator("#alive").inner_text() == "Alive at 1: 300.00 KiB"
    assert "#1" in page.locator("#chosen").inner_text()
    page.click("#peak")
    assert "Alive at the peak" in page.locator("#alive").inner_text()


def test_device_with_the_highest_peak_is_shown_first_and_named(visit: Callable[..., Any]) -> None:
    page = visit(figure(four_buffers(device=[0, 1, 0, 1, 0, 1, 1, 0]), title="four").html())
    options = ["device 0, peak 100.00 KiB", "device 1, peak 600.00 KiB"]
    assert page.locator("#device option").all_inner_texts() == options
    assert page.locator("#device").input_value() == "1"
    assert (page.locator("h1").inner_text(), page.title()) == ("four · device 1", "device 1 · four")
    assert "peak load 600.00 KiB" in page.locator("#facts").inner_text()
    page.select_option("#device", "0")
    assert (page.locator("h1").inner_text(), page.title()) == ("four · device 0", "device 0 · four")
    assert "peak load 100.00 KiB" in page.locator("#facts").inner_text()


HOSTILE = (
    "</title></script><script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "'\"`]]>--><!--",
    "\U0001f600 \u202e\x00\x1b[31m\u2028",
    "\ud800",
    "x" * 100_000,
    "https://example.com/a.png",
)


def test_names_of_a_trace_are_text(visit: Callable[..., Any]) -> None:
    count = len(HOSTILE)
    trace = Trace.of(
        [0] * count, np.arange(count), 1000, operation=np.arange(count), frame=np.arange(count),
        names=HOSTILE, metadata={"</script>": "<script>alert(3)</script>"},
    )  # fmt: skip
    for title in HOSTILE[:3]:
        page = visit(figure(trace, frames=True, title=title).html())
        assert page.title() == page.locator("h1").inner_text() == title
    page.click("#peak")
    assert HOSTILE[1] in page.locator("#composition").inner_text()
    page.select_option("#by", "operation")
    page.fill("#search", "</script>")
    assert page.locator("#found").inner_text().startswith("1 buffer of")
    page.press("#search", "Enter")
    shown = page.locator("#chosen").inner_text()
    assert HOSTILE[0] in shown
    assert page.locator("script").count() == visit(figure(four_buffers()).html()).locator("script").count()
    assert page.locator("img").count() == 0


ASKING = {
    "fetch('https://a.b').catch(() => 0)": "connect-src",
    "document.body.append(Object.assign(document.createElement('iframe'), {src: '//a.b'}))": "frame-src",
    "document.forms[0].action = 'https://a.b'; document.forms[0].submit()": "form-action",
}


def test_page_policy_refuses_the_network(page: Any, complaints: list[str]) -> None:
    for code, directive in ASKING.items():
        refused = page.evaluate(
            """(code) => new Promise((done) => {
              document.addEventListener("securitypolicyviolation", (event) => done(event.effectiveDirective))
              new Function(code)()
              setTimeout(() => done("nobody"), 3000)
            })""",
            code,
        )
        assert refused == directive
    complaints.clear()


def test_notebook_shows_the_page_in_a_frame(visit: Callable[..., Any]) -> None:
    """The title text does not end the frame, and no script of the page reaches the notebook."""
    shown = figure(four_buffers(), title='a"><script>alert(1)</script>')._repr_html_()
    ready = "document.readyState === 'complete'"
    page = visit(f"<!doctype html><title>notebook</title>{shown}", ready=ready)
    frame = page.frame_locator("iframe")
    assert frame.locator("h1").inner_text(timeout=10_000) == 'a"><script>alert(1)</script>'
    assert page.locator("script").count() == 0
    frame.locator("#in").click()
    page.wait_for_timeout(600)  # an embedded page must not change the address of the outer page
    assert "#" not in page.url


def test_bokeh_shows_the_figure_without_the_page(visit: Callable[..., Any]) -> None:
    """Rectangles and tooltips work, as under `output_notebook`."""
    from bokeh.embed import file_html
    from bokeh.resources import INLINE

    html = file_html(figure(four_buffers()).model(), INLINE, "by itself")
    html = html.replace(
        "<head>",
        "<head><script>addEventListener('mempool-show', (e) => { mempoolShow = e.detail }, true)</script>",
    )
    page = visit(html)
    assert visible(page) == [0, 1, 2, 3]
    page.mouse.move(*place(page, 4.5, 500 * KIB))
    assert "operation three" in (tooltip(page) or "")

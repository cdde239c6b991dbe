"""The stacked picture in a browser: placement, outlines, order, and the peak of each column."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pages import place, tooltip, visible
from shown import four_buffers

from mempool.show import content, figure
from traces import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.browser

KIB = 1024


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    return visit(figure(four_buffers(), frames=True, title="four").html())


def under(page: Any, time: float, kib: float) -> str | None:
    """Return the buffer named by the tooltip at a place."""
    page.mouse.move(*place(page, time, kib * KIB))
    said = tooltip(page)
    return said.splitlines()[0] if said else None


def test_oldest_buffer_is_lowest_and_others_slide_down(page: Any) -> None:
    assert page.locator("#stacked").get_attribute("aria-pressed") == "true"
    assert visible(page) == [0, 1, 2, 3]
    assert [under(page, 1.5, kib) for kib in (50, 150, 310)] == ["buffer #0", "buffer #1", None]
    assert [under(page, 2.5, kib) for kib in (50, 150, 210)] == ["buffer #1", "buffer #1", None]
    assert [under(page, 4.5, kib) for kib in (150, 300, 650, 710)] == [
        "buffer #1",
        "buffer #2",
        "buffer #3",
        None,
    ]


def test_outline_of_a_buffer_follows_the_buffers_below(page: Any) -> None:
    page.mouse.click(*place(page, 4.5, 300 * KIB))
    data = page.evaluate("mempoolShow.models.chosen.data")
    assert [round(high / KIB) for high in data["bytes"]] == [200, 200, 0, 0, 400, 400, 600, 600]
    assert data["time"] == pytest.approx([3, 5, 5, 6, 6, 5, 5, 3], abs=0.02)
    assert "#2" in page.locator("#chosen").inner_text()


def test_grouped_owners_are_stacked_by_their_bytes(page: Any) -> None:
    """Buffer 2 is the largest at the peak, and therefore lowest."""
    page.focus("#figure")
    page.keyboard.press("g")
    assert page.locator("#together").is_checked()
    assert [under(page, 4.5, kib) for kib in (150, 500, 650)] == ["buffer #2", "buffer #1", "buffer #3"]
    page.keyboard.press("g")
    assert under(page, 4.5, 150) == "buffer #1"


def test_found_buffers_are_lowest(page: Any) -> None:
    page.fill("#search", "stream=7")
    assert [under(page, 4.5, kib) for kib in (100, 250, 500)] == ["buffer #1", "buffer #3", "buffer #2"]


def test_pixel_column_shows_its_highest_moment(visit: Callable[..., Any]) -> None:
    """One event of a hundred thousand holds a GiB: visible, although a pixel is some hundred events wide."""
    start = np.arange(100_000)
    size = np.full(100_000, 1000)
    start[60_000], size[60_000] = 60_000, 1 << 30
    page = visit(figure(Buffers.of(start, start + 1, size)).html())
    assert 60_000 in visible(page)
    assert page.evaluate("Math.max(...mempoolShow.drawn.moments)") >= 99_990


def test_small_pieces_are_a_single_grey_band(
    visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the capacity of a page, the picture is still as high as the load, and the page says so."""
    monkeypatch.setattr(content, "MOST_NUMBERS", 40)
    buffers = Buffers.of([0] * 100, [100] * 100, [1000] * 10 + [10] * 90)
    page = visit(figure(buffers).html())
    assert len(visible(page)) == 10
    assert "the largest 10 one by one, the others grey" in page.locator("#facts").inner_text()
    page.mouse.move(*place(page, 50, 10_450))
    assert tooltip(page) is None
    painted = """(bytes) => {
      const {drawn} = mempoolShow, {width, height, bottom, top} = drawn
      return drawn.image[Math.floor((bytes - bottom) / (top - bottom) * height) * width + (width >> 1)] !== 0
    }"""
    heights = (9_990, 10_450, 10_890, 10_920)
    assert [page.evaluate(painted, high) for high in heights] == [True, True, True, False]

"""Helpers for tests of pages in a browser: positions on the screen, and drawn content."""

from __future__ import annotations

from typing import Any


def place(page: Any, time: float, address: float) -> tuple[float, float]:
    """Return the place of a time and an address on the screen."""
    x, y = page.evaluate(
        """([time, address]) => {
          const plot = mempoolShow.models.addresses, view = Bokeh.index.find_one_by_id(plot.id)
          const box = view.canvas_view.el.getBoundingClientRect()
          return [box.left + view.frame.x_scale.compute(time), box.top + view.frame.y_scale.compute(address)]
        }""",
        [time, address],
    )
    return x, y


def window(page: Any) -> dict[str, float]:
    """Return the visible ranges of times and addresses."""
    said: dict[str, float] = page.evaluate(
        """() => { const {x_range: x, y_range: y} = mempoolShow.models.addresses
          return {left: x.start, right: x.end, bottom: y.start, top: y.end} }"""
    )
    return said


def resting(page: Any) -> None:
    """Wait until all changes are drawn."""
    page.evaluate("() => new Promise((done) => setTimeout(done, 200))")


def tooltip(page: Any) -> str | None:
    box = page.locator(".mempool-tooltip")
    return box.inner_text() if box.is_visible() else None


def visible(page: Any) -> list[int]:
    rows: list[int] = page.evaluate("mempoolShow.visible()")
    return rows

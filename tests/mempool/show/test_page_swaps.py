"""A page of swaps in a browser: buffers on the device, away, copied out and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from swap_steps import one_move, step_from

from mempool.show import Figure, swap_scene
from solvers.swap import Link

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.browser

MIB = 1 << 20


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    """A page of ten operations of a second: a 4 MiB buffer is away from 3 to 7, in favour of another."""
    step = step_from([1.0] * 10, [(4 * MIB, [(0, True), (9, False)]), (4 * MIB, [(4, True), (5, False)])])
    schedule = one_move((0, 0, 0, 3, 7, 9))
    link = Link(0.0, 1 / (2 * MIB), 0.0, 1 / (2 * MIB))
    return visit(Figure(swap_scene(step, link, schedule, limit=4 * MIB, title="swaps")).html())


def rows(page: Any, source: str, *names: str) -> list[tuple[Any, ...]]:
    data = page.evaluate(f"mempoolShow.models.{source}.data")
    return sorted(zip(*(data[name] for name in names), strict=True))


def test_stays_absences_and_copies_are_drawn(page: Any) -> None:
    """Stays as rectangles, the absence as an outline, copies from asked for to waited for, a mark on each."""
    edges = ("row", "left", "right", "bottom", "top")
    stays = [(0, 0, 3, 0, 4 * MIB), (0, 7, 10, 0, 4 * MIB), (1, 4, 6, 0, 4 * MIB)]
    assert rows(page, "large", *edges) == stays
    assert rows(page, "absent", *edges) == [(0, 3, 7, 0, 4 * MIB)]
    assert rows(page, "copies", *edges) == [(0, 1, 3, 0, 4 * MIB), (0, 7, 9, 0, 4 * MIB)]
    assert rows(page, "marks", "time", "address") == [(1, 2 * MIB), (7, 2 * MIB)]
    assert len(set(page.evaluate("mempoolShow.models.marks.data.colour"))) == 2
    assert "copied to the host" in page.locator("#legend").inner_text()


def test_load_before_and_after_swapping_is_drawn(page: Any) -> None:
    assert max(page.evaluate("Array.from(mempoolShow.models.before.data.bytes)")) == 8 * MIB
    assert max(page.evaluate("Array.from(mempoolShow.models.curve.data.bytes)")) == 4 * MIB
    assert page.evaluate("mempoolShow.models.load.y_range.end") > 8 * MIB
    facts = page.locator("#facts").inner_text()
    for said in ("8 MiB without swaps", "planned for 4 MiB", "1 move of 4 MiB", "takes 0.0% longer"):
        assert said in facts

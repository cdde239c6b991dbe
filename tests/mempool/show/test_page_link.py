"""The address of a page: view state is written into the address, and restored from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pages import place, visible, window
from shown import four_buffers

from mempool.show import figure

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.browser

KIB = 1024
STATE = """() => [mempoolShow.picture, mempoolShow.index, mempoolShow.by, mempoolShow.together,
  mempoolShow.time, mempoolShow.chosen, document.getElementById("search").value]"""


@pytest.fixture
def page(visit: Callable[..., Any]) -> Any:
    return visit(figure(four_buffers(), allocators=["first_fit"], title="four").html())


def test_page_address_restores_the_whole_view_state(page: Any) -> None:
    page.select_option("#view", "1")
    page.click("#stacked")
    page.select_option("#by", "stream")
    page.check("#together")
    page.fill("#search", "operation=two")
    page.mouse.click(*place(page, 4.5, 150 * KIB))
    page.click("#in")
    page.wait_for_function("location.hash.includes('search')")
    page.wait_for_timeout(400)
    before = (page.evaluate(STATE), window(page), visible(page))
    assert before[0] == ["stacked", 1, "stream", True, 4, 1, "operation=two"]
    page.reload()
    page.wait_for_function("window.mempoolShow !== undefined && mempoolShow.drawn !== undefined")
    now = (page.evaluate(STATE), window(page), visible(page))
    assert (now[0], now[2]) == (before[0], before[2])
    assert now[1] == pytest.approx(before[1])
    assert page.locator("#composition tr.chosen").count() == 1


def test_changed_page_address_changes_the_view(page: Any) -> None:
    page.evaluate("location.hash = 'picture=stacked&owner=operation&time=1'")
    page.wait_for_function("mempoolShow.picture === 'stacked'")
    assert page.locator("#alive").inner_text() == "Alive at 1: 300.00 KiB"
    page.evaluate("location.hash = ''")
    page.wait_for_function("mempoolShow.picture === 'addresses'")


@pytest.mark.parametrize(
    "state",
    [
        "view=99&picture=__proto__&owner=constructor&piece=-1&x=5~1&y=NaN~Infinity&time=NaN",
        "view=1.5&piece=1e99&x=0~Infinity&time=Infinity&owner=frame",
        "<script>alert(1)</script>",
        "%ff%00&&&==",
    ],
)
def test_invalid_page_address_does_no_harm(page: Any, state: str) -> None:
    page.evaluate("(state) => { location.hash = state }", state)
    page.wait_for_timeout(400)
    assert page.evaluate(STATE)[:2] == ["addresses", 0]
    assert visible(page) == [0, 1, 2, 3]

"""The table of owners in a browser: linked with the picture both ways, in the picture's colours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from pages import place
from shown import four_buffers

from mempool.show import figure
from traces import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

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


def marked(page: Any, how: str) -> list[str]:
    return [text.split("\t")[0].strip() for text in page.locator(f"#composition tr.{how}").all_inner_texts()]


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


def test_buffer_marks_its_row(page: Any) -> None:
    page.select_option("#by", "operation")
    page.mouse.move(*place(page, 4.5, 300 * KIB))
    assert marked(page, "pointed") == ["three"]
    page.mouse.click(*place(page, 4.5, 300 * KIB))
    page.mouse.move(*place(page, 0.5, 50 * KIB))
    assert (marked(page, "pointed"), marked(page, "chosen")) == (["one"], ["three"])
    page.mouse.move(*place(page, 0.5, 600 * KIB))
    assert marked(page, "pointed") == []


def test_owner_beyond_the_table_gets_a_row_while_marked(visit: Callable[..., Any]) -> None:
    count = 150
    trace = Trace.of(
        [0] * count, np.arange(count), np.arange(1, count + 1) * 1000,
        operation=np.arange(count), names=[f"op {k}" for k in range(count)],
    )  # fmt: skip
    page = visit(figure(trace).html())
    assert (len(rows(page)), rows(page)[-1]) == (101, "and 50 more")
    page.evaluate("mempoolShow.choose(3)")
    assert (rows(page)[-1], marked(page, "chosen")) == ("op 3", ["op 3"])
    page.focus("#figure")
    page.keyboard.press("Escape")
    assert len(rows(page)) == 101


def test_colours_of_the_table_equal_the_picture(visit: Callable[..., Any]) -> None:
    """The fourteen largest owners have a colour of their own, the largest first, the unknown is grey."""
    count = 40
    operation = np.append(np.arange(count - 1), -1)
    trace = Trace.of(
        [0] * count, np.arange(count), np.arange(1, count + 1) * 1000, address=np.arange(count) * 10**6,
        operation=operation, names=[f"op {k}" for k in range(count - 1)],
    )  # fmt: skip
    page = visit(figure(trace).html())
    page.click("#addresses")
    swatches = page.evaluate(
        "[...document.querySelectorAll('#composition i')].map((one) => one.style.background)"
    )
    assert rows(page)[:3] == ["(unknown)", "op 38", "op 37"]
    assert len({colour.replace(" ", "") for colour in swatches[:15]}) == 15
    drawn = page.evaluate("Array.from(mempoolShow.colour, (one) => mempoolShow.palette.css[one & ~1])")
    assert [colour.replace(" ", "") for colour in swatches] == drawn[::-1]


@pytest.mark.parametrize("name", ["<b>", "a=b", " spaced ", "#1", "=4MiB", "x" * 1000])
def test_row_of_any_name_finds_its_buffers(visit: Callable[..., Any], name: str) -> None:
    trace = Trace.of([0, 0], [0, 1], [5, 6], operation=[0, 1], names=(name, f"more {name}"))
    page = visit(figure(trace).html())
    page.locator("#composition tbody tr button").nth(1).click()
    assert found(page) == [0]

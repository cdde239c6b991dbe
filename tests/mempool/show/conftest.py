"""A browser for the tests of pages: Debian's Chromium driven by Playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Browsers of Debian and its relatives.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
_READY = "window.mempoolShow !== undefined && mempoolShow.drawn !== undefined"


@pytest.fixture(scope="module")  # a session scope would block other event loops in this thread
def chromium() -> Iterator[Any]:
    """The browser; without a GPU the browser draws in software."""
    pytest.importorskip("bokeh")
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, _NAMES)), None)
    if path is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    """Errors, warnings and alerts of pages; a test that provokes some removes them."""
    return []


@pytest.fixture
def visit(chromium: Any, tmp_path: Path, complaints: list[str]) -> Iterator[Callable[..., Any]]:
    """Open pages; assert at the end that none used the network or complained.

    ``visit(html)`` returns a page that has drawn; further arguments are those of Playwright's
    ``new_context``.
    """
    asked: list[str] = []
    with contextlib.ExitStack() as closing:

        def visit(html: str, *, ready: str = _READY, **how: Any) -> Any:
            file = tmp_path / "page.html"
            file.write_text(html, encoding="utf-8")
            context = chromium.new_context(viewport={"width": 1280, "height": 1000}, **how)
            closing.callback(context.close)
            page = context.new_page()
            page.on(
                "console", lambda said: said.type in ("error", "warning") and complaints.append(said.text)
            )
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
            page.on("request", lambda request: asked.append(request.url))
            context.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
            page.goto(file.as_uri())
            page.wait_for_function(ready, timeout=20_000)
            return page

        yield visit
    assert complaints == []
    assert set(asked) <= {(tmp_path / "page.html").as_uri(), "about:srcdoc"}

"""Pages of a million buffers: processor time to write one; in the browser the first paint and panning."""

from __future__ import annotations

import shutil
import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from mempool.show import figure
from traces.workload import generate

if TYPE_CHECKING:
    from pathlib import Path

#: Frames while the pointer drags to and fro, in ms between them.
_COUNT_FRAMES = """() => {
  window.frames_ms = []
  let last = performance.now()
  const frame = (now) => { frames_ms.push(now - last); last = now; requestAnimationFrame(frame) }
  requestAnimationFrame(frame)
}"""


@pytest.fixture(autouse=True)
def only_when_asked(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("benchmark_enable"):
        pytest.skip("a benchmark: --benchmark-enable")


def test_a_million_buffers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """500 iterations of 2,000 buffers each; seconds and frames are for reading, and gate nothing."""
    pytest.importorskip("bokeh")
    playwright = pytest.importorskip("playwright.sync_api")
    trace = generate(2000, 3, iterations=500)
    begin = time.process_time()
    html = figure(trace).html()
    rows = [("processor seconds", time.process_time() - begin), ("MB", len(html) / 1e6)]
    (tmp_path / "page.html").write_text(html, encoding="utf-8")
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.goto((tmp_path / "page.html").as_uri())
        drawn = "performance.getEntriesByName('mempool-drawn')"
        page.wait_for_function(f"{drawn}.length > 0")
        rows.append(("seconds to the first rectangles", page.evaluate(f"{drawn}[0].startTime") / 1000))
        for zoom in (1, 20, 400):
            page.evaluate("(factor) => { mempoolShow.whole(); mempoolShow.zoom(factor) }", zoom)
            page.wait_for_timeout(1000)
            rows.append((f"frames a second, zoom {zoom}", _panned(page)))
        browser.close()
    with capsys.disabled():
        print()
        for what, value in rows:
            print(f"{what:32} {value:8.2f}")


def _panned(page: Any) -> float:
    page.evaluate(_COUNT_FRAMES)
    page.mouse.move(700, 500)
    page.mouse.down()
    for k in range(120):
        page.mouse.move(700 + 3 * min(k, 120 - k), 500 + k % 40)
    frames = page.evaluate("frames_ms")
    page.mouse.up()
    return 1000 / statistics.mean(frames[1:])

"""Completion and plot of ``mempool fit``, which need no PyTorch."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mempool.cli.fit.plot import draw


def test_names_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mempool.cli.fit import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    cards = command.complete_cards("rtx 40")
    assert {"RTX 4060", "RTX 4060 Ti 8GB", "RTX 4080", "RTX 4090"} < set(cards)
    assert all(card.startswith("RTX 40") for card in cards)
    assert "train.py" in command.complete_targets("tr")
    assert "planned" in command.allocators()("pl")


def size_result(batch: int, seq: int, needed: int, limit: int | None) -> Any:
    command = SimpleNamespace(
        needed_bytes=needed, peak_bytes=needed // 2, limit_bytes=limit, fits=limit is None or needed <= limit,
        allocator="pytorch", reserved_bytes={"pytorch": needed}, warnings=[], batch=batch, mode="train",
    )  # fmt: skip
    return SimpleNamespace(fit=command, title="<Net> & co", seq=seq, image=None)


@pytest.mark.parametrize("limit", [None, 5 << 30])
def test_plot_has_a_point_for_each_size_and_a_line_for_each_length_and_the_limit(limit: int | None) -> None:
    results = [
        size_result(batch, seq, batch * seq << 20, limit) for seq in (512, 1024) for batch in (1, 2, 4, 8)
    ]
    drawing = ET.fromstring(draw(results, page=False))
    space = "{http://www.w3.org/2000/svg}"
    points = drawing.findall(f"{space}circle")
    assert len(points) == len(results)
    strokes = [path for path in drawing.findall(f"{space}path") if path.get("stroke-width") == "2"]
    assert len(strokes) == 2
    assert bool(drawing.findall(f"{space}path[@stroke-dasharray]")) is (limit is not None)
    heights = [float(point.get("cy", "")) for point in points[:4]]
    assert heights == sorted(heights, reverse=True)
    assert "<Net> & co" in "".join(drawing.itertext())


def test_plot_page_has_the_numbers_too_and_loads_nothing() -> None:
    page = draw([size_result(batch, 512, batch << 30, None) for batch in (1, 3)], page=True)
    assert "<td>3 GiB</td>" in page
    assert "src=" not in page
    assert "&lt;Net&gt; &amp; co" in page
    ET.fromstring(draw([size_result(1, 1, 0, None)] * 2, page=False))  # a single value, and no memory

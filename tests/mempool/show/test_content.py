"""Packed content of a page: faithful and bounded, with all text of a trace inside."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown import Packed, four_buffers

from mempool.show import content, scene_of
from mempool.show.packed_columns import Packer, clean
from mempool.show.thinning import density_of_small_pieces
from traces import Buffers, Trace

if TYPE_CHECKING:
    from mempool.show import Scene

NUMBERS = st.lists(st.integers(-1, 2**62), max_size=30)


@given(NUMBERS, NUMBERS)
def test_columns_round_trip(plain: list[int], ascending: list[int]) -> None:
    ascending.sort()
    packer = Packer()
    said = [packer.column(plain), packer.column(ascending, delta=True)]
    back = Packed(packer.packed({"columns": said}))
    assert [back.column(one).tolist() for one in back.said["columns"]] == [plain, ascending]


def test_source_lines_are_included_only_on_request() -> None:
    scene = scene_of(four_buffers())
    assert "one.py" not in str(Packed(content.content_of(scene)[0]).said)
    frame = Packed(content.content_of(scene, frames=True)[0]).said["timelines"][0]["frame"]
    assert sorted(frame["names"]) == ["four.py:4", "one.py:1", "three.py:3", "two.py:2"]


def many(count: int) -> Scene:
    rng = np.random.default_rng(1)
    start = np.sort(rng.integers(0, 10**6, count))
    buffers = Buffers.of(start, start + rng.integers(1, 100, count), rng.integers(1, 10**6, count))
    return scene_of(buffers)


def test_largest_pieces_are_kept_beyond_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_NUMBERS", 400)
    scene = many(1000)
    text, counts = content.content_of(scene)
    assert counts == {"pieces": 1000, "drawn": 100}
    back = Packed(text)
    (timeline,), (view,) = back.said["timelines"], back.said["views"]
    area = back.column(timeline["size"]) * back.column(timeline["length"])
    whole = scene.timelines[0]
    areas = whole.size[whole.owner] * (whole.end - whole.start)
    assert sorted(area.tolist()) == sorted(areas.tolist())[-100:]
    assert (np.diff(back.column(timeline["start"])) >= 0).all()
    assert timeline["load"]["peak"][1] == load(whole).max()
    assert back.column(view["rest"]["of"]).any()


def test_page_never_exceeds_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "MOST_CHARACTERS", 250_000)
    text, counts = content.content_of(many(40_000))
    assert len(text) <= 250_000
    assert 1000 < counts["drawn"] < 40_000


def load(timeline: object) -> np.ndarray:
    from mempool.show.thinning import load_of

    return load_of(timeline)[1]  # type: ignore[arg-type]


def test_picture_of_the_rest_has_the_area_of_the_rest() -> None:
    rng = np.random.default_rng(2)
    start = np.append(0, rng.integers(0, 10**6, 1000))
    size = np.append(10**9, rng.integers(1, 10**6, 1000))
    scene = scene_of(Buffers.of(start, start + np.append(10**6, rng.integers(1, 3000, 1000)), size))
    (timeline,), (view,) = scene.timelines, scene.views
    large = timeline.size[timeline.owner] == 10**9
    picture = density_of_small_pieces(timeline, view, np.flatnonzero(large)) / 255
    area = (timeline.size[timeline.owner] * (timeline.end - timeline.start))[~large].sum()
    cell = view.top / 256 * (timeline.end.max() - timeline.start.min()) / 1024
    assert picture.sum() * cell == pytest.approx(area, rel=0.05)  # each cell is rounded up


@pytest.mark.parametrize(
    ("name", "shown"),
    [("plain", "plain"), ("a\x00b\u202ec\x1b", "a\ufffdb\ufffdc\ufffd"), ("x" * 10**7, "x" * 299 + "…")],
    ids=["plain", "hostile", "huge"],
)
def test_names_are_cleaned(name: str, shown: str) -> None:
    """Control characters and marks that change the direction of text are removed, and names are cut."""
    assert clean(name) == shown


def test_many_huge_names_make_no_huge_page() -> None:
    count = 30_000
    names = [f"{k}" + "é" * 400 for k in range(count)]
    trace = Trace.of([0] * count, np.arange(count), 1, operation=np.arange(count), names=names)
    assert len(content.content_of(scene_of(trace))[0]) < 25_000_000


@pytest.mark.parametrize(
    "buffers", [Buffers.of([], [], []), Buffers.of([0], [1], [0]), Buffers.of([0], [0], [9])]
)
def test_nothing_to_draw_is_a_page_too(buffers: Buffers) -> None:
    text, counts = content.content_of(scene_of(buffers))
    assert counts == {"pieces": 0, "drawn": 0}
    assert Packed(text).said["timelines"][0]["load"]["peak"] == [0, 0]

"""Tests of ``mempool show``: output files, and one-line errors for unusable input."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from answers import answer
from shown import Packed, four_buffers
from snapshots import event, segment, stored

from mempool.cli.app import call
from traces.formats.parquet import write_trace
from traces.workload import generate

SNAPSHOTS = Path(__file__).parents[3] / "shared" / "bench" / "pytorch_snapshots"
drawn = pytest.mark.skipif(importlib.util.find_spec("bokeh") is None, reason="bokeh is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with a plain trace, a repeating trace, and a plan of each solver for the latter."""
    monkeypatch.chdir(tmp_path)
    write_trace(four_buffers(), "four.trace")
    write_trace(generate(60, 1), "t.trace")
    assert call(["plan", "t.trace", "-o", "t.plan", "--json"]) == 0
    assert call(["plan", "t.trace", "--whole", "-o", "whole.plan", "--json"]) == 0
    return tmp_path


def content(page: str) -> Packed:
    """Return the content packed into a page."""
    text = Path(page).read_text(encoding="utf-8")
    item = json.loads(text.split('<script type="application/json" id="item">')[1].split("</script>")[0])
    return Packed(_packed(item))


def _packed(item: Any) -> str:
    """Return the argument of the given name, wherever Bokeh puts the packed data."""
    if isinstance(item, dict):
        for key, value in item.items():
            if found := value if key == "packed" and isinstance(value, str) else _packed(value):
                return found
    elif isinstance(item, list):
        if len(item) == 2 and item[0] == "packed":
            return str(item[1])
        return next(filter(None, map(_packed, item)), "")
    return ""


@drawn
def test_page_is_written_into_the_current_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page is named after the trace, and the answer agrees with the page."""
    shown = answer(capsys, "show", "four.trace")
    assert shown["page"] == "four.html"
    assert shown["page_bytes"] == (folder / "four.html").stat().st_size
    assert (shown["buffers"], shown["pieces"], shown["drawn"]) == (4, 4, 4)
    assert shown["views"] == [{"view": "recorded", "of": "trace"}]
    assert content("four.html").said["title"] == "four.trace"


@drawn
@pytest.mark.parametrize(
    ("plan", "views"),
    [
        ("whole.plan", [("plan", "trace")]),
        ("t.plan", [("plan", "iteration"), ("planned, greedy", "trace")]),
    ],
)
def test_plan_is_shown_with_its_trace(
    folder: Path, capsys: pytest.CaptureFixture[str], plan: str, views: list[tuple[str, str]]
) -> None:
    """On the trace's own time for a plan of the whole trace, else on the time of one iteration."""
    shown = answer(capsys, "show", "t.trace", plan, "-o", "p.html")
    assert [(one["view"], one["of"]) for one in shown["views"]] == views
    assert len(content("p.html").said["views"]) == len(views)


@drawn
def test_simulated_allocators_are_views(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each view has addresses and reserved segments."""
    shown = answer(capsys, "show", "four.trace", "-a", "first_fit", "-a", "best_fit")
    assert [one["view"] for one in shown["views"]] == ["recorded", "first_fit", "best_fit"]
    back = content("four.html")
    for view in back.said["views"][1:]:
        assert (back.column(view["address"]) >= 0).all()
        assert back.column(view["segments"]["size"]).sum() >= 700 * 1024


@drawn
def test_lost_history_is_reported_and_not_simulated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the terminal, in the JSON and on the page; a requested allocator has nothing to simulate."""
    stored(folder / "end.pickle", [], segments=[segment((4096, 1024, 1000, "active_allocated"))])
    assert call(["show", "end.pickle"]) == 0
    assert "end.pickle: history not recorded" in " ".join(capsys.readouterr().out.split())
    (caveat,) = answer(capsys, "show", "end.pickle")["caveats"]
    assert (caveat["of"], caveat["caveat"][:20]) == ("trace", "history not recorded")
    (timeline,) = content("end.html").said["timelines"]
    assert (timeline["still"], timeline["caveats"]) == (True, [caveat["caveat"]])
    assert call(["show", "end.pickle", "-a", "first_fit"]) == 3
    assert "none were recorded" in capsys.readouterr().err


@drawn
def test_snapshot_of_a_failed_run_names_the_refused_request(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The refused request has its stack if source lines are requested."""
    frames = [{"name": "scores", "filename": "/home/me/attention.py", "line": 42}]
    died = event("oom", 0, 900, 2, device_free=100, frames=frames)
    stored(folder / "died.pickle", [event("alloc", 4096, 512, 1), died])
    answer(capsys, "show", "died.pickle", "--frames")
    refused = content("died.html").said["timelines"][0]["notes"]["refused"]
    assert refused["stack"]["names"] == ["attention.py:42 scores"]
    assert content("died.html").column(refused["asked"]).tolist() == [900]
    assert content("died.html").column(refused["free"]).tolist() == [100]
    answer(capsys, "show", "died.pickle")
    assert "attention" not in json.dumps(content("died.html").said)


def test_our_own_pool_is_among_the_allocators(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "show", "t.trace", "-a", "planned_online", "--lenient", "--perfetto", "p.json")
    assert [one["view"] for one in shown["views"]] == ["planned_online"]
    assert shown["skipped"] == {}


@drawn
def test_plan_is_shown_without_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "show", "t.plan")
    assert (shown["page"], shown["views"]) == ("t.html", [{"view": "plan", "of": "iteration"}])


def test_perfetto_alone_needs_no_bokeh(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = answer(capsys, "show", "four.trace", "--perfetto", "four.json.gz")
    assert "page" not in shown
    assert shown["slices"] == 4
    assert shown["perfetto_bytes"] == (folder / "four.json.gz").stat().st_size
    assert not (folder / "four.html").exists()


@drawn
def test_page_contains_no_folders_and_source_lines_only_on_request(folder: Path) -> None:
    """A page is sent to others: no folder is included, and source lines only with --frames."""
    assert call(["show", str(folder / "four.trace"), "-o", "p.html"]) == 0
    assert str(folder) not in json.dumps(content("p.html").said)
    assert "one.py" not in json.dumps(content("p.html").said)
    assert call(["show", "four.trace", "-o", "p.html", "--frames"]) == 0
    assert "one.py" in json.dumps(content("p.html").said)


def test_missing_bokeh_is_a_single_line_with_the_install_command(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bokeh" else found(name))
    assert call(["show", "four.trace"]) == 4
    assert "pip install 'mempool[show]'" in capsys.readouterr().err
    assert not (folder / "four.html").exists()


@drawn
@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="the shared snapshots are not there")
def test_real_snapshot_has_its_segments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The recorded view has PyTorch's reserved segments; unused address space is left out."""
    shown = answer(capsys, "show", str(SNAPSHOTS / "small.pickle"), "-o", "small.html")
    assert shown["buffers"] == 36
    back = content("small.html")
    (view,) = back.said["views"]
    assert len(back.column(view["segments"]["size"])) == 9
    assert view["top"] < 2 * sum(back.column(view["segments"]["size"]))

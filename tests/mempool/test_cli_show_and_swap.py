"""``mempool swap`` and ``show``: limits in, schedules, pages and files out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from answers import Cli
from shown import Packed, four_buffers
from snapshots import segment, stored
from swap_steps import MIB, training

from traces.formats.parquet import write_trace
from traces.workload import generate

drawn = pytest.mark.skipif(importlib.util.find_spec("bokeh") is None, reason="bokeh is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """Enter a folder with a plain trace, a repeating trace, and a plan of each solver for the latter."""
    monkeypatch.chdir(tmp_path)
    write_trace(four_buffers(), "four.trace")
    write_trace(generate(60, 1), "t.trace")
    cli.run("plan t.trace -o t.plan")
    cli.run("plan t.trace --whole -o whole.plan")
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
def test_page_is_written_into_the_current_folder(folder: Path, cli: Cli) -> None:
    """The page is named after the trace, and the answer agrees with the page."""
    shown = cli.answer("show four.trace")
    assert shown["page"] == "four.html"
    assert shown["page_bytes"] == (folder / "four.html").stat().st_size
    assert (shown["buffers"], shown["pieces"], shown["drawn"]) == (4, 4, 4)
    assert content("four.html").said["title"] == "four.trace"


@drawn
@pytest.mark.parametrize(
    ("files", "views"),
    [
        ("four.trace", [("recorded", "trace")]),
        ("t.plan", [("plan", "iteration")]),
        ("t.trace whole.plan", [("plan", "trace")]),
        ("t.trace t.plan", [("plan", "iteration"), ("planned, greedy", "trace")]),
    ],
)
def test_traces_and_plans_have_their_views(
    folder: Path, cli: Cli, files: str, views: list[tuple[str, str]]
) -> None:
    """On the trace's own time for a plan of the whole trace, else on the time of one iteration."""
    shown = cli.answer("show", files, "-o p.html")
    assert [(one["view"], one["of"]) for one in shown["views"]] == views
    assert len(content("p.html").said["views"]) == len(views)


@drawn
def test_simulated_allocators_are_views(folder: Path, cli: Cli) -> None:
    """Each view has addresses and reserved segments."""
    shown = cli.answer("show four.trace -a first_fit -a best_fit")
    assert [one["view"] for one in shown["views"]] == ["recorded", "first_fit", "best_fit"]
    back = content("four.html")
    for view in back.said["views"][1:]:
        assert (back.column(view["address"]) >= 0).all()
        assert back.column(view["segments"]["size"]).sum() >= 700 * 1024


@drawn
def test_lost_history_is_reported_and_not_simulated(folder: Path, cli: Cli) -> None:
    """The terminal, the JSON and the page report it; a requested allocator has no events to simulate."""
    stored(folder / "end.pickle", [], segments=[segment((4096, 1024, 1000, "active_allocated"))])
    assert "end.pickle: history not recorded" in " ".join(cli.printed("show end.pickle").split())
    (caveat,) = cli.answer("show end.pickle")["caveats"]
    assert (caveat["of"], caveat["caveat"][:20]) == ("trace", "history not recorded")
    (timeline,) = content("end.html").said["timelines"]
    assert (timeline["still"], timeline["caveats"]) == (True, [caveat["caveat"]])
    assert "none were recorded" in cli.error("show end.pickle -a first_fit", code=3)


def test_our_own_pool_is_among_the_allocators(folder: Path, cli: Cli) -> None:
    shown = cli.answer("show t.trace -a planned_online --lenient --perfetto p.json")
    assert [one["view"] for one in shown["views"]] == ["planned_online"]
    assert shown["skipped"] == {}


def test_perfetto_alone_needs_no_bokeh(folder: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bokeh" else found(name))
    assert "pip install 'mempool[show]'" in cli.error("show four.trace", code=4)
    shown = cli.answer("show four.trace --perfetto four.json.gz")
    assert "page" not in shown
    assert shown["slices"] == 4
    assert shown["perfetto_bytes"] == (folder / "four.json.gz").stat().st_size
    assert not (folder / "four.html").exists()


@drawn
def test_page_contains_no_folders_and_source_lines_only_on_request(folder: Path, cli: Cli) -> None:
    """A page is sent to others: no folder is included, and source lines only with --frames."""
    cli.run("show", folder / "four.trace", "-o p.html")
    assert str(folder) not in json.dumps(content("p.html").said)
    assert "one.py" not in json.dumps(content("p.html").said)
    cli.run("show four.trace -o p.html --frames")
    assert "one.py" in json.dumps(content("p.html").said)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_trace(training(), "run.trace")


@pytest.mark.usefixtures("run")
class TestSwap:
    def test_each_limit_has_its_row(self, cli: Cli) -> None:
        said = cli.answer("swap run.trace --limit 33MiB --limit free --limit 50%")
        assert said["peak_load_bytes"] == 49 * MIB
        assert said["repeats"]
        held, free, slower = said["limits"]
        assert held["peak_bytes"] <= held["limit_bytes"] == 33 * MIB
        assert free["stall_seconds"] == 0
        assert slower["stall_seconds"] <= 0.5 * said["iteration_seconds"]
        for row in (held, free, slower):
            total = said["iteration_seconds"] + row["stall_seconds"]
            assert row["iteration_seconds"] == pytest.approx(total)
            assert row["swapped_bytes"] == row["moves"] * 8 * MIB

    def test_curve_without_a_limit_stalls_longer_at_lower_limits(self, cli: Cli) -> None:
        rows = cli.answer("swap run.trace --link 1e-5,1e-10")["limits"]
        assert len(rows) > 2
        stalls = [row["stall_seconds"] for row in rows]
        assert stalls == sorted(stalls)
        assert [row["limit_bytes"] for row in rows] == sorted((r["limit_bytes"] for r in rows), reverse=True)

    def test_swap_table_and_moves_file_agree_with_the_limit(self, cli: Cli) -> None:
        shown = cli.printed("swap run.trace --limit 33MiB -o moves.json")
        written = json.loads(Path("moves.json").read_text())
        assert "33 MiB" in shown
        assert written["limits"][0]["limit_bytes"] == 33 * MIB
        assert len(written["moves"]) == written["limits"][0]["moves"] > 0
        for move in written["moves"]:
            order = [move[f"{name}_operation"] for name in ("last", "out", "release", "fetch", "use")]
            assert order == sorted(order)

    def test_trace_without_marks_is_cut_where_iterations_repeat(self, cli: Cli) -> None:
        write_trace(training(marks=False, layers=20), "plain.trace")
        said = cli.answer("swap plain.trace --limit free")
        assert (said["repeats"], said["operations"]) == (True, 40)
        whole = cli.answer("swap run.trace --limit free --whole")
        assert (whole["repeats"], whole["operations"]) == (False, 48)

    def test_below_the_working_set_the_answer_is_no(self, cli: Cli) -> None:
        out, error = cli.run("swap run.trace --limit 1MiB --limit 40MiB", code=1)
        assert "cannot be held" in out
        assert "no gain possible below" in error
        least = int(error.split("; ")[1].split(" bytes")[0])
        assert f"{least} bytes (9 MiB) is feasible" in error
        cli.run(f"swap run.trace --limit {least}")
        assert "touches" in cli.error(f"swap run.trace --limit {least - 1}", code=1)

    def test_measured_link_is_reported_and_used(self, cli: Cli) -> None:
        out, error = cli.run("swap run.trace --limit 40MiB --link Measured")
        assert error.startswith("mempool: the link is measured ")
        assert len(error.splitlines()) == 1
        (line,) = [line for line in out.splitlines() if line.startswith("link  ")]
        assert "GB/s, back " in line

    def test_host_limit_is_kept_and_reported(self, cli: Cli) -> None:
        """A lower limit that needs more host memory can no longer be held.

        The arenas are reported for the last limit.
        """
        much = cli.answer("swap run.trace --limit 25MiB")
        (row,) = much["limits"]
        assert row["host_bytes"] >= 24 * MIB
        assert much["arena_bytes"] >= row["peak_bytes"]
        assert much["host_arena_bytes"] >= row["host_bytes"]
        (row,) = cli.answer("swap run.trace --limit 33MiB --host 16MiB")["limits"]
        assert row["host_bytes"] <= 16 * MIB
        out, error = cli.run("swap run.trace --limit 25MiB --host 16MiB", code=1)
        assert "cannot be held" in out
        assert "is feasible" in error
        told = cli.printed("swap run.trace --host 16MiB")
        assert "with so few bytes on the host, not below 33 MiB" in told
        assert "so few bytes" not in cli.printed("swap run.trace")

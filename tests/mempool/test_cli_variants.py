"""Traces whose marks separate several variants of an iteration: joint plans for any order of variants."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import programs
import pytest
from answers import answer
from pools import simulated
from programs_with_variants import at_random, in_steps, marking_last, misses, variants, with_states

import mempool.planning.joint_planning
import solvers.packing.streams
from mempool import Pool
from mempool.cli.app import call
from mempool.cli.check import matching_plans
from mempool.offline import read_input, with_first
from mempool.planning.joint_planning import JointPlanning, plan_jointly
from mempool.planning.plan_files import SavedPlans, read_plans, write_plans
from solvers import PlanError, peak_load
from solvers.packing.check import check_variants
from solvers.packing.variants import VariantSet
from traces import EventType, Trace
from traces.formats.parquet import read_trace, write_trace
from traces.trace import COLUMNS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

THREE = (900, 1300, 1900)


def recorded(
    path: Path, scales: Sequence[int], work: Callable[..., None] = in_steps, steps: int = 60, **how: bool
) -> None:
    """Record the trace of a program with the given number of variants, without a plan."""
    with Pool(simulated(), background=False, mode="record", record=str(path)) as pool:
        memory = programs.Watched(pool)
        work(pool, with_states(memory, variants(memory, at_random(tuple(scales)), **how)), steps)
        memory.free_all()


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("work", [in_steps, marking_last])
def test_pool_follows_given_joint_plans_from_the_second_iteration_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], work: Callable[..., None], late: bool, long: bool
) -> None:
    """The order of variants differs from the recording."""
    recorded(tmp_path / "run.trace", THREE, work, late=late, long=long)
    result = answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    assert len(result["variants"]) == len(THREE)
    with Pool(simulated(), background=False, plan=tmp_path / "run.plan") as pool:
        memory = programs.Watched(pool)
        order = at_random(THREE)
        iteration = with_states(memory, variants(memory, lambda n: order(n + 500), late=late, long=long))
        work(pool, iteration, 1)
        assert misses(pool, lambda: work(pool, iteration, 200, first=1)) == 0
        assert pool.plans == 0
        assert pool.report().to_dict()["planned_arena_bytes"] == result["arena_bytes"]
        memory.free_all()
    assert answer(capsys, "check", tmp_path / "run.plan", tmp_path / "run.trace")["variants"] == len(THREE)


def test_arena_of_joint_plans_equals_the_largest_variants_arena(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    result = answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    each = result["variants"]
    assert result["arena_bytes"] == each[0]["arena_bytes"] == max(kind["arena_bytes"] for kind in each)
    assert result["peak_load_bytes"] == each[0]["peak_load_bytes"]
    together = list(read_plans(tmp_path / "run.plan").variants.values())
    assert result["lower_bound_bytes"] >= peak_load(VariantSet(together).buffers) >= result["peak_load_bytes"]
    assert result["arena_bytes"] >= result["lower_bound_bytes"]
    assert result["arena_bytes"] < 1.25 * max(kind["peak_load_bytes"] for kind in each)
    about = answer(capsys, "info", tmp_path / "run.trace")
    assert about["iterations"] == about["variants"][0]["iterations"]
    assert about["iteration_peak_load_bytes"] == max(kind["peak_load_bytes"] for kind in about["variants"])
    assert sum(kind["iterations"] for kind in about["variants"]) >= 58  # all but the first ones
    assert answer(capsys, "info", tmp_path / "run.plan")["arena_bytes"] == result["arena_bytes"]


def test_tables_list_the_variants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "run.trace", THREE)
    for verb in ("plan", "info"):
        assert call([verb, str(tmp_path / "run.trace")]) == 0
        shown = capsys.readouterr().out
        assert "the largest of 3 kinds" in shown
        assert "kinds of iterations" in shown


def test_many_variants_differing_in_sizes_share_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", range(900, 2000, 50), steps=80)
    result = answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    assert [kind["sizes_vary"] for kind in result["variants"]] == [True]
    assert result["iterations"] > 70
    assert answer(capsys, "check", tmp_path / "run.plan", tmp_path / "run.trace")["variants"] == 1
    with Pool(simulated(), background=False, plan=tmp_path / "run.plan") as pool:
        memory = programs.Watched(pool)
        iteration = with_states(memory, variants(memory, lambda number: 905 + 37 * number % 1000))  # not seen
        in_steps(pool, iteration, 2)
        assert misses(pool, lambda: in_steps(pool, iteration, 50, first=2)) == 0
        memory.free_all()
    assert call(["plan", str(tmp_path / "run.trace")]) == 0
    assert "whose sizes vary" in capsys.readouterr().out


def test_variants_are_planned_separately_by_other_solvers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    answer(capsys, "plan", tmp_path / "run.trace", "--solver", "best_fit", "-o", tmp_path / "run.plan")
    saved = read_plans(tmp_path / "run.plan")
    assert len(saved.plans) == len(THREE)
    assert not saved.variants
    assert {planned.plan.solver for planned in saved.plans} == {"best_fit"}
    assert answer(capsys, "check", tmp_path / "run.plan", tmp_path / "run.trace")["variants"] == len(THREE)


def test_for_several_arenas_the_largest_is_planned_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    result = answer(capsys, "plan", tmp_path / "run.trace", "--capacity", "1MiB", "--capacity", "1MiB")
    assert len(result["variants"]) == 1
    largest = max(
        kind["peak_load_bytes"] for kind in answer(capsys, "info", tmp_path / "run.trace")["variants"]
    )
    assert result["peak_load_bytes"] == largest


def test_variant_beyond_the_capacity_yields_no_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    fitting = answer(capsys, "plan", tmp_path / "run.trace")
    result = answer(
        capsys, "plan", tmp_path / "run.trace", "--capacity", str(fitting["arena_bytes"] // 2), code=1
    )
    assert result["variants"] is None
    assert result["arena_bytes"] is None


def damaged(path: Path, change: Callable[[list[Any]], None], *, together: bool) -> None:
    """Return the plans with one changed."""
    saved = read_plans(path)
    plans = list(saved.plans)
    change(plans)
    write_plans(SavedPlans(plans, saved.variants if together else {}), path)


def moved(number: int) -> Callable[[list[Any]], None]:
    """Return a plan whose buffers all lie at the start of the arena."""

    def change(plans: list[Any]) -> None:
        plan = plans[number].plan
        offset = np.where(plan.offset >= 0, 0, plan.offset)
        plans[number] = dataclasses.replace(plans[number], plan=dataclasses.replace(plan, offset=offset))

    return change


@pytest.mark.parametrize("number", range(len(THREE)))
@pytest.mark.parametrize("together", [False, True])
def test_invalid_plan_of_any_variant_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, together: bool
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    assert read_plans(tmp_path / "run.plan").variants
    damaged(tmp_path / "run.plan", moved(number), together=together)
    assert call(["check", str(tmp_path / "run.plan"), str(tmp_path / "run.trace")]) != 0


@pytest.mark.parametrize("solver", ["auto", "best_fit"])
@pytest.mark.parametrize("other", ["kept for longer", "another kind"])
def test_plan_of_another_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], other: str, solver: str
) -> None:
    """The other trace has the same sizes with longer-lived gradients, or a new variant."""
    recorded(tmp_path / "run.trace", THREE, late=False)
    answer(capsys, "plan", tmp_path / "run.trace", "--solver", solver, "-o", tmp_path / "run.plan")
    if other == "kept for longer":
        write_trace(_freed_later(read_trace(tmp_path / "run.trace")), tmp_path / "other.trace")
    else:
        recorded(tmp_path / "other.trace", (*THREE[:2], 2100))
    result = answer(capsys, "check", tmp_path / "run.plan", tmp_path / "other.trace", code=1)
    assert "another trace" in result["reason"]


@pytest.mark.parametrize("solver", ["auto", "best_fit"])
def test_check_uses_the_alignment_of_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], solver: str
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    answer(capsys, "plan", tmp_path / "run.trace", "--solver", solver, "-o", tmp_path / "run.plan")
    trace = read_trace(tmp_path / "run.trace")
    strict = dataclasses.replace(trace, metadata={**trace.metadata, "alignment": "4096"})
    write_trace(strict, tmp_path / "strict.trace")
    result = answer(capsys, "check", tmp_path / "run.plan", tmp_path / "strict.trace", code=1)
    assert "not aligned" in result["reason"]


def test_plan_of_a_single_variant_of_an_envelope_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool saves such a plan before seeing another variant."""
    scales = (900, *range(900, 2000, 50))
    with Pool(simulated(), background=False, record=str(tmp_path / "run.trace")) as pool:
        memory = programs.Watched(pool)
        order = [900] * 20 + [scales[number % len(scales)] for number in range(80)]
        iteration = with_states(memory, variants(memory, order.__getitem__))
        in_steps(pool, iteration, 20)
        assert pool.planned is not None
        pool.save(tmp_path / "early.plan")
        in_steps(pool, iteration, 80, first=20)
        memory.free_all()
    assert [one["sizes_vary"] for one in answer(capsys, "info", tmp_path / "run.trace")["variants"]] == [True]
    assert answer(capsys, "check", tmp_path / "early.plan", tmp_path / "run.trace")["ok"]


def test_planning_many_variants_takes_no_longer_than_the_largest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other variants need no better plan than the largest."""
    recorded(tmp_path / "run.trace", THREE)
    alone = answer(capsys, "plan", tmp_path / "run.trace", "--capacity", "1MiB", "--capacity", "1MiB")
    together = answer(capsys, "plan", tmp_path / "run.trace", "--solver", "search")
    assert together["nodes"] < 1000 + 2 * max(alone["nodes"], 20_000_000)


def test_each_of_lifetime_reach_and_staying_is_looked_at(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    given, solved = (read_input(tmp_path / name) for name in ("run.trace", "run.plan"))
    assert matching_plans(tmp_path / "run.plan", solved, given)
    assert given.pattern is not None
    rows, reach = given.pattern.buffers, given.pattern.reach
    first = np.arange(len(rows)) == np.flatnonzero(~rows.persistent)[0]
    for longer in (
        {"buffers": dataclasses.replace(rows, end=rows.end + first)},
        {"buffers": dataclasses.replace(rows, persistent=rows.persistent | first)},
        {"reach": {key: into + 20 * first for key, into in reach.items()}},
    ):
        changed = dataclasses.replace(given, pattern=dataclasses.replace(given.pattern, **longer))
        with pytest.raises(PlanError, match="lives longer than planned"):
            matching_plans(tmp_path / "run.plan", solved, changed)


def test_first_plan_carries_its_joint_plans_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "run.trace", THREE)
    answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    saved = read_plans(tmp_path / "run.plan")
    other = with_first(saved, saved.plans[2])
    assert [planned.key for planned in other.plans] == [saved.plans[n].key for n in (2, 0, 1)]
    assert [other.plans[n].key for n in other.variants] == [saved.plans[n].key for n in saved.variants]
    for number, kind in other.variants.items():
        assert len(kind) == len(other.plans[number].buffers)
        assert kind.buffers.size.tolist() == other.plans[number].buffers.size.tolist()
    check_variants(list(other.variants.values()), [other.plans[number].plan for number in other.variants])


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the stop conditions of solves; the second solve is interrupted."""
    stops: list[Any] = []

    def told(*arguments: Any, stop: Any, **how: Any) -> Any:
        plan = solve(*arguments, stop=stop, **how)
        stops.append(stop)
        return plan if len(stops) != 2 else dataclasses.replace(plan, stopped_by="interrupt")

    solve = solvers.packing.streams.solve_streams
    monkeypatch.setattr(solvers.packing.streams, "solve_streams", told)
    return stops


def test_time_limit_is_shared_by_variants_and_an_interrupt_ends_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], solves: list[Any]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    command = ("plan", tmp_path / "run.trace", "--time-limit", "40", "-o", tmp_path / "run.plan")
    assert answer(capsys, *command, code=130)["stopped_by"] == "interrupt"
    assert [stop.seconds for stop in solves] == [10, 10, 10]  # and ten for all together
    assert [stop.nodes for stop in solves] == [None, None, 0]
    assert solves[0].target_bytes is None
    assert None not in [stop.target_bytes for stop in solves[1:]]  # beside the largest there is enough
    saved = read_plans(tmp_path / "run.plan")
    assert len(saved.plans) == len(THREE)
    assert not saved.variants


def test_variants_are_planned_separately_where_joint_plans_need_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    monkeypatch.setattr(JointPlanning, "is_worth_it", lambda *_: False)
    answer(capsys, "plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan")
    assert not read_plans(tmp_path / "run.plan").variants


@pytest.mark.parametrize("capacity", ["largest", "less than together"])
def test_capacity_holds_for_all_joint_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, capacity: str
) -> None:
    """Variants that fit only separately are planned separately."""
    recorded(tmp_path / "run.trace", THREE, late=True)
    joint = answer(capsys, "plan", tmp_path / "run.trace")
    if capacity == "less than together":
        together = plan_jointly

        def larger(*made: Any, **how: Any) -> Any:
            saved = together(*made, **how)
            assert saved is not None
            first = saved.plans[0]
            plan = dataclasses.replace(first.plan, arena_bytes=joint["arena_bytes"] + 1)
            return dataclasses.replace(saved, plans=[dataclasses.replace(first, plan=plan), *saved.plans[1:]])

        monkeypatch.setattr(mempool.planning.joint_planning, "plan_jointly", larger)
    command = ["plan", tmp_path / "run.trace", "-o", tmp_path / "run.plan"]
    result = answer(capsys, *command, "--capacity", str(joint["arena_bytes"]))
    assert result["arena_bytes"] <= joint["arena_bytes"]
    assert bool(read_plans(tmp_path / "run.plan").variants) == (capacity == "largest")


def test_zero_time_limit_still_yields_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "run.trace", THREE)
    command = ("plan", tmp_path / "run.trace", "--time-limit", "0", "-o", tmp_path / "run.plan")
    assert answer(capsys, *command)["stopped_by"] == "time"
    assert answer(capsys, "check", tmp_path / "run.plan", tmp_path / "run.trace")["variants"] == len(THREE)


def test_iterations_of_all_variants_begin_at_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "run.trace", THREE)
    begins = read_input(tmp_path / "run.trace").begins
    kinds_told = answer(capsys, "info", tmp_path / "run.trace")["variants"]
    assert len(begins) == sum(kind["iterations"] for kind in kinds_told)
    marks = np.flatnonzero(read_trace(tmp_path / "run.trace").kind == EventType.MARK)
    assert set((begins - 1).tolist()) <= set(marks.tolist())
    assert (np.diff(begins) > 0).all()


def _freed_later(trace: Trace) -> Trace:
    """Return the trace with the first frees after each mark delayed by some allocations."""
    order = np.arange(len(trace), dtype=np.float64)
    marks = np.flatnonzero(trace.kind == EventType.MARK)
    allocs = np.flatnonzero(trace.kind == EventType.ALLOC)
    for free in np.flatnonzero(trace.kind == EventType.FREE):
        mark = marks[np.searchsorted(marks, free) - 1]
        if trace.births[free] < mark and np.searchsorted(allocs, free) - np.searchsorted(allocs, mark) < 4:
            order[free] = allocs[np.searchsorted(allocs, free) + 5] + 0.5
    rows = np.argsort(order, kind="stable")
    return dataclasses.replace(trace, **{name: getattr(trace, name)[rows] for name in COLUMNS})

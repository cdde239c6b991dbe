"""Traces whose marks separate several variants of an iteration: joint plans for any order of variants."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from answers import Cli
from combinations import combinations
from pools import simulated
from random_variants import at_random, in_steps, marking_last, misses, variants, with_states

import mempool.planning.variants
from mempool import Pool
from mempool.cli.app import call
from mempool.cli.check import matching_plans
from mempool.offline import read_input
from mempool.planning.plan_files import SavedPlans, read_plans, write_plans
from mempool.planning.variants import plan_jointly
from solvers import PlanError, peak_load
from solvers.packing.variants import VariantSet
from traces import EventType, Trace
from traces.formats.parquet import read_trace, write_trace
from traces.trace import COLUMNS

THREE = (900, 1300, 1900)


def recorded(
    path: Path, scales: Sequence[int], work: Callable[..., None] = in_steps, steps: int = 60, **how: bool
) -> None:
    """Record the trace of a program with the given number of variants, without a plan."""
    with Pool(simulated(), background=False, mode="record", record=str(path)) as pool:
        memory = programs.Watched(pool)
        work(pool, with_states(memory, variants(memory, at_random(tuple(scales)), **how)), steps)
        memory.free_all()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trace of a program of three variants, and its plan."""
    path = tmp_path_factory.mktemp("variants")
    recorded(path / "run.trace", THREE)
    assert call(["plan", f"{path}/run.trace", "-o", f"{path}/run.plan"]) == 0
    return path


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize(
    ("work", "late", "long"), combinations([in_steps, marking_last], [False, True], [False, True], every=3)
)
def test_pool_follows_given_joint_plans_from_the_second_iteration_on(
    tmp_path: Path, cli: Cli, work: Callable[..., None], late: bool, long: bool
) -> None:
    """The order of variants differs from the recording."""
    trace, plan = tmp_path / "run.trace", tmp_path / "run.plan"
    recorded(trace, THREE, work, late=late, long=long)
    result = cli.answer("plan", trace, "-o", plan)
    assert len(result["variants"]) == len(THREE)
    with Pool(simulated(), background=False, plan=plan) as pool:
        memory = programs.Watched(pool)
        order = at_random(THREE)
        iteration = with_states(memory, variants(memory, lambda n: order(n + 500), late=late, long=long))
        work(pool, iteration, 1)
        assert misses(pool, lambda: work(pool, iteration, 200, first=1)) == 0
        assert pool.plans == 0
        assert pool.report().to_dict()["planned_arena_bytes"] == result["arena_bytes"]
        memory.free_all()
    assert cli.answer("check", plan, trace)["variants"] == len(THREE)


def test_arena_of_joint_plans_equals_the_largest_variants_arena(folder: Path, cli: Cli) -> None:
    result = cli.answer("plan run.trace")
    each = result["variants"]
    assert result["arena_bytes"] == each[0]["arena_bytes"] == max(kind["arena_bytes"] for kind in each)
    assert result["peak_load_bytes"] == each[0]["peak_load_bytes"]
    together = list(read_plans(folder / "run.plan").variants.values())
    assert result["lower_bound_bytes"] >= peak_load(VariantSet(together).buffers) >= result["peak_load_bytes"]
    assert result["arena_bytes"] >= result["lower_bound_bytes"]
    assert result["arena_bytes"] < 1.25 * max(kind["peak_load_bytes"] for kind in each)
    about = cli.answer("info run.trace")
    assert about["iterations"] == about["variants"][0]["iterations"]
    assert about["iteration_peak_load_bytes"] == max(kind["peak_load_bytes"] for kind in about["variants"])
    assert sum(kind["iterations"] for kind in about["variants"]) >= 58  # all but the first ones
    assert cli.answer("info run.plan")["arena_bytes"] == result["arena_bytes"]
    for verb in ("plan", "info"):
        shown = cli.printed(verb, "run.trace")
        assert "the largest of 3 variants" in shown
        assert "variants of iterations" in shown


def test_many_variants_differing_in_sizes_share_a_plan(tmp_path: Path, cli: Cli) -> None:
    trace, plan = tmp_path / "run.trace", tmp_path / "run.plan"
    recorded(trace, range(900, 2000, 50), steps=80)
    result = cli.answer("plan", trace, "-o", plan)
    assert [kind["sizes_vary"] for kind in result["variants"]] == [True]
    assert result["iterations"] > 70
    assert cli.answer("check", plan, trace)["variants"] == 1
    with Pool(simulated(), background=False, plan=plan) as pool:
        memory = programs.Watched(pool)
        iteration = with_states(memory, variants(memory, lambda number: 905 + 37 * number % 1000))  # not seen
        in_steps(pool, iteration, 2)
        assert misses(pool, lambda: in_steps(pool, iteration, 50, first=2)) == 0
        memory.free_all()
    assert "whose sizes vary" in cli.printed("plan", trace)


def test_variants_are_planned_separately_by_other_solvers(folder: Path, cli: Cli) -> None:
    cli.run("plan run.trace --solver greedy -o run.plan")
    saved = read_plans(folder / "run.plan")
    assert len(saved.plans) == len(THREE)
    assert not saved.variants
    assert {planned.plan.solver for planned in saved.plans} == {"greedy"}
    assert cli.answer("check run.plan run.trace")["variants"] == len(THREE)


@pytest.mark.parametrize("number", range(len(THREE)))
@pytest.mark.parametrize("together", [False, True])
def test_invalid_plan_of_any_variant_is_refused(folder: Path, cli: Cli, number: int, together: bool) -> None:
    """In the invalid plan all buffers are at the start of the arena."""
    saved = read_plans(folder / "run.plan")
    assert saved.variants
    plan = saved.plans[number].plan
    moved = dataclasses.replace(plan, offset=np.where(plan.offset >= 0, 0, plan.offset))
    saved.plans[number] = dataclasses.replace(saved.plans[number], plan=moved)
    write_plans(SavedPlans(saved.plans, saved.variants if together else {}), folder / "run.plan")
    assert call(["check", "run.plan", "run.trace"]) != 0


@pytest.mark.parametrize("solver", ["auto", "greedy"])
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("kept for longer", "another trace"),
        ("another kind", "another trace"),
        ("another alignment", "not aligned"),
    ],
)
def test_plan_of_another_trace_is_refused(
    folder: Path, cli: Cli, other: str, reason: str, solver: str
) -> None:
    """The other trace has the same sizes with longer-lived gradients, a new variant, or larger alignment."""
    cli.run("plan run.trace -o run.plan --solver", solver)
    trace = read_trace("run.trace")
    if other == "kept for longer":
        write_trace(_freed_later(trace), "other.trace")
    elif other == "another kind":
        recorded(folder / "other.trace", (*THREE[:2], 2100))
    else:
        metadata = {**trace.metadata, "alignment": "4096"}
        write_trace(dataclasses.replace(trace, metadata=metadata), "other.trace")
    assert reason in cli.answer("check run.plan other.trace", code=1)["reason"]


def test_plan_of_a_single_variant_of_an_envelope_is_accepted(tmp_path: Path, cli: Cli) -> None:
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
    kinds = cli.answer("info", tmp_path / "run.trace")["variants"]
    assert [one["sizes_vary"] for one in kinds] == [True]
    assert cli.answer("check", tmp_path / "early.plan", tmp_path / "run.trace")["ok"]


def test_each_of_lifetime_reach_and_staying_is_compared(folder: Path) -> None:
    given, solved = (read_input(folder / name) for name in ("run.trace", "run.plan"))
    assert matching_plans(folder / "run.plan", solved, given)
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
            matching_plans(folder / "run.plan", solved, changed)


@pytest.mark.parametrize("capacity", ["largest", "less than together"])
def test_capacity_holds_for_all_joint_plans(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, capacity: str
) -> None:
    """Variants that fit only separately are planned separately."""
    trace, plan = tmp_path / "run.trace", tmp_path / "run.plan"
    recorded(trace, THREE, late=True)
    joint = cli.answer("plan", trace)
    if capacity == "less than together":
        together = plan_jointly

        def larger(*made: Any, **how: Any) -> Any:
            saved = together(*made, **how)
            assert saved is not None
            first = saved.plans[0]
            plan = dataclasses.replace(first.plan, arena_bytes=joint["arena_bytes"] + 1)
            return dataclasses.replace(saved, plans=[dataclasses.replace(first, plan=plan), *saved.plans[1:]])

        monkeypatch.setattr(mempool.planning.variants, "plan_jointly", larger)
    result = cli.answer("plan", trace, "-o", plan, f"--capacity {joint['arena_bytes']}")
    assert result["arena_bytes"] <= joint["arena_bytes"]
    assert bool(read_plans(plan).variants) == (capacity == "largest")


def test_zero_time_limit_still_yields_a_plan(folder: Path, cli: Cli) -> None:
    assert cli.answer("plan run.trace --time-limit 0 -o run.plan")["stopped_by"] == "time"
    assert cli.answer("check run.plan run.trace")["variants"] == len(THREE)


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

"""Plans in files: damage, other programs, and files of each rank."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import run, simulated

from mempool import Pool, per_rank_files
from mempool.planning.plan_files import SavedPlans, read_plans, write_plans
from solvers import PlanError, read_plan, write_plan
from solvers.packing.plan_files import read_plan_columns
from traces import TraceError
from traces.formats.parquet import read_trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "whole.plan"
    with Pool(simulated(), background=False) as pool:
        run(pool, programs.training(programs.Watched(pool)), 12, marks=True)
        pool.save(path)
    return path


def warm_up(**columns: Any) -> str:
    return json.dumps({"size": [2000], "position": [0], "sequence": [0], "marks": [], **columns})


@pytest.mark.parametrize(
    ("sequence", "says"),
    [
        (lambda n: np.zeros(n - 1, np.int32), "sequence is not a column of"),
        (lambda n: np.zeros(n + 5, np.int32), "sequence is not a column of"),
        (lambda n: np.zeros(0, np.int32), "sequence is not a column of"),
        (lambda n: np.full(n, -3, np.int32), "sequence is out of range"),
        (lambda n: np.full(n, 2**31 - 1, np.int32), "sequence is out of range"),
        (lambda n: np.full(n, 2**63, np.uint64), "sequence is out of range"),
        (lambda n: np.full(n, np.nan), "sequence holds something else"),
    ],
)
def test_damaged_sequence_is_refused(whole: Path, tmp_path: Path, sequence: Any, says: str) -> None:
    plan, buffers, extra = read_plan(whole)
    path = tmp_path / "damaged.plan"
    write_plan(plan, buffers, path, extra=extra, extra_columns={"sequence": sequence(len(buffers))})
    with pytest.raises(TraceError, match=f"damaged.plan: .*{says}"):
        read_plans(path)
    with pytest.raises(TraceError, match=says):
        Pool(simulated(), background=False, plan=path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[" * 100_000, "RecursionError"),
        ("null", "TypeError"),
        ("{}", "KeyError"),
        (warm_up(size=["a"]), "size holds something else"),
        (warm_up(size=[2**70]), "size holds something else"),
        (warm_up(size=[float("nan")]), "size holds something else"),
        (warm_up(size=[0]), "size is out of range"),
        (warm_up(size=[[1, 2], [3, 4]]), "size is not a column"),
        (warm_up(size=[[1, 2], [3]]), "ValueError"),
        (warm_up(size=5), "size is not a column"),
        (warm_up(position=[0, 0]), "position is not a column of 1"),
        (warm_up(position=[10**6]), "position is out of range"),
        (warm_up(sequence=[2**40]), "sequence is out of range"),
        (warm_up(marks=[2]), "marks is out of range"),
    ],
)
def test_damaged_warm_up_is_refused(whole: Path, tmp_path: Path, text: str, says: str) -> None:
    plan, buffers, extra = read_plan(whole)
    path = tmp_path / "damaged.plan"
    write_plan(plan, buffers, path, extra={**extra, "warm_up": text}, extra_columns=read_plan_columns(whole))
    with pytest.raises(TraceError, match=f"damaged.plan: .*{says}"):
        read_plans(path)


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of two kinds of iterations, made together."""
    path = tmp_path_factory.mktemp("plans") / "several.plan"
    with Pool(simulated(), background=False) as pool:
        memory = programs.Watched(pool)
        kept: list[int] = []

        def iteration(number: int) -> None:
            scale = (1000, 1700)[number * number % 7 % 2]
            programs.layers(memory, 8, scale=scale)
            while kept:
                memory.free(kept.pop())
            kept.extend(memory.allocate(scale * part) for part in range(1, 8))

        run(pool, iteration, 120, marks=True)
        pool.save(path)
        memory.free_all()
    return path


def test_file_of_several_plans_round_trips(several: Path) -> None:
    saved = read_plans(several)
    assert list(saved.variants) == [0, 1]
    assert read_plans(several).plans[0].key == saved.plans[0].key
    assert all(kind.reach.any() for kind in saved.variants.values())


def further(columns: dict[str, Any], *, factor: int = 1, **extra: str) -> Any:
    """Return the further plan of the columns with its offsets times ``factor``, as a column again."""
    file = BytesIO(columns["other.1"].tobytes())
    plan, buffers, before = read_plan(file)
    assert plan.offset is not None
    plan, out = dataclasses.replace(plan, offset=factor * plan.offset), BytesIO()
    write_plan(plan, buffers, out, extra={**before, **extra}, extra_columns=read_plan_columns(file))
    return np.frombuffer(out.getbuffer(), np.uint8)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda columns: {"other.1": columns["other.1"][:-9]}, "not a whole Parquet file"),
        (lambda columns: {"other.1": columns["other.1"].astype(np.int32)}, "its other plans are not 1 to 1"),
        (lambda columns: {"other.1": None, "other.2": columns["other.1"]}, "its other plans are not 1 to 1"),
        (lambda columns: {f"other.{n}": columns["other.1"] for n in range(1, 17)}, "17 plans are more than"),
        (lambda columns: {"kind.reach": columns["kind.reach"][1:]}, "a kind's reach is not a column of"),
        (lambda columns: {"kind.reach": 0 * columns["kind.reach"] - 1}, "a kind's reach is out of range"),
        (lambda columns: {"kind.end": columns["kind.end"][:0]}, "a kind's end is not a column of"),
        (lambda columns: {"kind.reach": columns["kind.reach"] + 40}, "several.plan: .*overlap"),
        (lambda columns: {"other.1": None}, "variants are missing"),
        (lambda columns: {"other.2": further(columns, kind="2")}, "two plans of the same sequence"),
        (lambda columns: {"other.1": further(columns, factor=0)}, "several.plan: .*overlap"),
    ],
)
def test_damaged_other_plans(several: Path, tmp_path: Path, change: Any, says: str) -> None:
    plan, buffers, extra = read_plan(several)
    columns = read_plan_columns(several)
    changed = {name: column for name, column in {**columns, **change(columns)}.items() if column is not None}
    path = tmp_path / "several.plan"
    write_plan(plan, buffers, path, extra=extra, extra_columns=changed)
    with pytest.raises((PlanError, TraceError), match=says) as error:
        Pool(simulated(), background=False, plan=path)
    assert str(error.value).startswith(str(path))


def test_variants_too_slow_to_check_are_refused(several: Path, tmp_path: Path) -> None:
    saved, path = read_plans(several), tmp_path / "long.plan"
    plans = []
    for one in saved.plans:
        assert one.plan.offset is not None
        offset = np.tile(one.plan.offset, 32)
        plans.append(dataclasses.replace(one, plan=dataclasses.replace(one.plan, offset=offset)))
    write_plans(SavedPlans(plans, saved.variants), path)
    with pytest.raises(PlanError, match=r"long.plan: 2 variants of \d+ buffers in up to \d+ columns are"):
        read_plans(path)


def test_buffers_without_an_offset_are_not_replayed(whole: Path, tmp_path: Path) -> None:
    """A gap over the whole lifetime leaves the checker nothing to check."""
    plan, buffers, extra = read_plan(whole)
    assert plan.offset is not None
    offset = plan.offset.copy()
    offset[0] = -65536
    row, start, end = (np.array([value]) for value in (0, buffers.start[0], buffers.end[0]))
    hollow = dataclasses.replace(buffers, gap_buffer=row, gap_start=start, gap_end=end)
    path = tmp_path / "hollow.plan"
    columns = read_plan_columns(whole)
    write_plan(dataclasses.replace(plan, offset=offset), hollow, path, extra=extra, extra_columns=columns)
    with pytest.raises(PlanError, match=r"hollow.plan: .*"):
        read_plans(path)


def test_plan_for_another_framework_is_left_aside(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The environment variable applies to the pools of all frameworks in a program."""
    import mempool.numpy

    saved, path = read_plans(whole), tmp_path / "torch.plan"
    for client, is_taken in (("torch", False), ("numpy", True), ("", True)):
        write_plans(dataclasses.replace(saved, client=client), path)
        monkeypatch.setenv("MEMPOOL_PLAN", str(path))
        with mempool.numpy.install(background=False) as numpys:
            assert (numpys.loaded is not None) == is_taken
    assert caplog.messages == [f"{path} is a plan for torch: no plan for numpy"]


KIB = 1 << 10
#: Seeds of a program's sizes.
SEED = st.integers(0, 1 << 16)


def sizes_of(seed: int, count: int) -> list[int]:
    """Return different sizes in KiB, in random order."""
    return random.Random(seed).sample(range(4, 1200), count)


def network(memory: programs.Watched, parameters: list[int], sizes: list[int]) -> Callable[[int], None]:
    """Return the iteration of a program: parameters in the first, then buffers, freed in reverse."""

    def iteration(number: int) -> None:
        if number == 0:
            for size in parameters:
                memory.allocate(size * KIB)
        kept = [memory.allocate(size * KIB) for size in sizes]
        for address in reversed(kept):
            memory.free(address)

    return iteration


def most_held(parameters: list[int], sizes: list[int], *, page: int, plan: Path | None = None) -> int:
    """Return the most bytes held while a program trains for six iterations."""
    with Pool(simulated(page=page), background=False, plan=plan) as pool:
        run(pool, network(programs.Watched(pool), parameters, sizes), 6, marks=True)
        return int(pool.core.stats()["reserved"]["peak"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@settings(max_examples=20)
@given(model=SEED, planned=SEED, other=SEED, scale=st.integers(2, 5), page=st.sampled_from([0, 4096]))
def test_plan_of_another_program_holds_no_more_memory_than_no_plan(
    folder: Path, model: int, planned: int, other: int, scale: int, page: int
) -> None:
    """The parameters are equal, as for one model; the activations are of other batches or layers."""
    path, parameters, sizes = folder / "other.plan", sizes_of(model, 12), sizes_of(planned, 50)
    with Pool(simulated(page=page), background=False) as pool:
        run(pool, network(programs.Watched(pool), parameters, sizes), 12, marks=True)
        pool.save(path)
    for foreign in (sizes_of(other, 60), [size * scale for size in sizes]):
        if foreign[:6] == sizes[:6]:
            continue  # the plan is followed for some allocations
        without = most_held(parameters, foreign, page=page)
        assert most_held(parameters, foreign, page=page, plan=path) <= 1.01 * without


def become(monkeypatch: pytest.MonkeyPatch, rank: int, size: int = 2) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(size))


def test_single_process_has_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert per_rank_files.rank() is None
    monkeypatch.setenv("RANK", "0")
    assert per_rank_files.rank() is None
    for size in ("1", "", "many", "-2"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert per_rank_files.rank() is None
    assert per_rank_files.own_file("a/run.plan") == "a/run.plan"
    assert per_rank_files.own_file("a/run.{rank}.plan") == "a/run.0.plan"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert per_rank_files.rank() == 0
    monkeypatch.delenv("RANK")
    assert per_rank_files.rank() is None
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert per_rank_files.rank() == 1


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("a.b/run.trace", "a.b/run.rank1.trace"),
        ("run", "run.rank1"),
        ("rank1/run.plan", "rank1/run.rank1.plan"),
        ("run-rank1.plan", "run-rank1.plan"),
        ("Rank_1.plan", "Rank_1.plan"),
        ("rank12.plan", "rank12.rank1.plan"),
        ("{rank}/run.plan", "1/run.plan"),
        ("/dev/null", "/dev/null"),
    ],
)
def test_file_name_gets_the_rank_once(monkeypatch: pytest.MonkeyPatch, name: str, own: str) -> None:
    become(monkeypatch, 1, 16)
    assert per_rank_files.own_file(name) == own


def test_each_rank_saves_and_replays_its_own_plan_or_the_common_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for rank in (0, 1):
        become(monkeypatch, rank)
        with Pool(simulated(), background=False) as pool:
            memory = programs.Watched(pool)
            layers = partial(programs.layers, memory, count=10 + rank)
            run(pool, lambda _, layers=layers: layers(), 8, marks=True)
            pool.save(tmp_path / "run.plan")
            assert f"mempool: pool (rank {rank})" in str(pool.report())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank0.plan", "run.rank1.plan"]
    buffers = []
    for rank in (0, 1, 2):
        if rank == 2:
            (tmp_path / "run.rank1.plan").rename(tmp_path / "run.plan")
        become(monkeypatch, rank, 3)
        with Pool(simulated(), background=False, plan=tmp_path / "run.plan") as pool:
            assert pool.planned is not None
            buffers.append(len(pool.planned.buffers))
    assert buffers == [30, 33, 33]


def test_traces_and_reports_of_ranks_do_not_overwrite_each_other(tmp_path: Path) -> None:
    """The processes start as under `torchrun --no-python mempool run`."""
    (tmp_path / "train.py").write_text("import numpy as np\nfor _ in range(50): np.ones(200_000) * 2\n")
    command = [sys.executable, "-P", "-m", "mempool", "run", "--record", "run.trace", "--json", "run.json"]
    for rank in ("0", "1"):
        environment = {**os.environ, "RANK": rank, "WORLD_SIZE": "2"}
        done = subprocess.run(
            [*command, "train.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        assert f"mempool: numpy (rank {rank})" in done.stderr
    names = {f"run.rank{rank}.{kind}" for rank in (0, 1) for kind in ("trace", "json")}
    assert {path.name for path in tmp_path.glob("run*")} == names
    for rank in (0, 1):
        assert len(read_trace(tmp_path / f"run.rank{rank}.trace")) >= 100
        said = json.loads((tmp_path / f"run.rank{rank}.json").read_text())
        assert said["pools"]["numpy"]["rank"] == rank


def test_torchrun_without_children_names_the_missing_option(tmp_path: Path) -> None:
    (tmp_path / "torchrun").write_text("print('trained')")
    command = [sys.executable, "-P", "-m", "mempool", "run"]
    for option, told in (("--quiet", True), ("--children", False)):
        done = subprocess.run(
            [*command, option, "torchrun"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        assert done.stdout == "trained\n"
        assert ("--children" in done.stderr) == told

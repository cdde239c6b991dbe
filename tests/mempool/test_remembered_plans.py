"""The second run of a program follows the plan of the first from its first iteration."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pools import simulated

from mempool import Pool, _core
from mempool.planning import remembered_plans
from mempool.planning.options import OPTIONS

MEMPOOL = Path(sys.executable).with_name("mempool")
PROGRAM = """
import sys
import numpy as np
import mempool.numpy

def step(factor):
    x = np.arange(20_000.0) * factor
    y = np.concatenate([x, x + 1])
    return float(y.sum())

length = int(sys.argv[1])
for number in range(40):
    step(length)
    if number == 20:
        mempool.numpy.installed().wait(60)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run a program under the pool with a cache folder of its own; return the report."""

    def run(*arguments: Any, environment: dict[str, str] | None = None) -> dict[str, Any]:
        file = tmp_path / "report.json"
        own = {"MEMPOOL_CACHE": str(tmp_path / "cache"), "MEMPOOL_REMEMBER": "1"}
        subprocess.run(
            [MEMPOOL, "run", "--quiet", "--json", file, *map(str, arguments)],
            check=True,
            env=os.environ | own | (environment or {}),
        )
        found: dict[str, Any] = json.loads(file.read_text())["pools"]["numpy"]
        return found

    return run


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "plans").glob("*"))


def test_second_run_follows_the_first_runs_plan(
    script: Path, tmp_path: Path, report: Callable[..., dict[str, Any]]
) -> None:
    first, second = report(script, 1), report(script, 1)
    assert first["plans"] >= 1
    assert first["plan_active_at_iteration"] > 5
    assert second["plans"] == 0
    assert second["plan_active_at_iteration"] <= 2
    assert second["hits_total"] > first["hits_total"]
    assert len(files(tmp_path)) == 1


def test_other_arguments_begin_with_the_newest_plan_of_the_program(
    script: Path, tmp_path: Path, report: Callable[..., dict[str, Any]]
) -> None:
    report(script, 1)
    assert report(script, 2)["plan_active_at_iteration"] <= 2
    other = tmp_path / "other.py"
    other.write_text(PROGRAM)
    assert report(other, 1)["plan_active_at_iteration"] > 5


def test_programs_of_every_start_follow_their_last_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Callable[..., dict[str, Any]]
) -> None:
    """A package that imports NumPy installs the pool before Python creates ``__main__`` from its module."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import numpy")
    (package / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    for start in (["-m", "package.train"], [f"-c{PROGRAM}"]):
        assert report("--fresh", *start, 1)["plan_active_at_iteration"] > 5, start
        assert report(*start, 1)["plan_active_at_iteration"] <= 2, start
    assert len(files(tmp_path)) == 2  # one of the module, one of the code


def test_program_from_standard_input_keeps_no_plan(tmp_path: Path) -> None:
    subprocess.run(
        [MEMPOOL, "run", "--quiet", "-", "1", "-c", "other.yaml"],
        input=PROGRAM,
        text=True,
        check=True,
        env=os.environ | {"MEMPOOL_CACHE": str(tmp_path / "cache"), "MEMPOOL_REMEMBER": "1"},
    )
    assert not files(tmp_path)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_keep_no_plan(
    tmp_path: Path, method: str, report: Callable[..., dict[str, Any]]
) -> None:
    body = PROGRAM.replace("\n", "\n    ")
    program = f"""
import multiprocessing
import numpy
def work():{body}
if __name__ == "__main__":
    child = multiprocessing.get_context("{method}").Process(target=work)
    child.start()
    child.join()
    assert child.exitcode == 0
"""
    script = tmp_path / "parent.py"
    script.write_text(program)
    report("--children", script, 1)
    assert not files(tmp_path)


@pytest.mark.parametrize(
    ("option", "value", "kept"), [("--fresh", "1", 1), ("", "fresh", 1), ("", "0", 0)], ids=repr
)
def test_a_run_starts_without_a_plan_where_asked(
    script: Path, tmp_path: Path, report: Callable[..., dict[str, Any]], option: str, value: str, kept: int
) -> None:
    asked = [option] if option else []
    for _ in range(2):
        said = report(*asked, script, 1, environment={"MEMPOOL_REMEMBER": value})
        assert said["plan_active_at_iteration"] > 5
    assert len(files(tmp_path)) == kept


@pytest.mark.parametrize("begins", ["import os, mempool.numpy", "import os"])
def test_relative_cache_folder_counts_from_the_folder_of_the_start(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str
) -> None:
    """The program changes its working folder before or after it imports the pool."""
    script.write_text(f"{begins}\nos.chdir('other')\n{PROGRAM}os.chdir('/')\n")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"MEMPOOL_CACHE": "cache", "MEMPOOL_REMEMBER": "1"}
    subprocess.run([MEMPOOL, "run", "--quiet", script, "1"], check=True, env=environment)
    assert len(files(tmp_path)) == 1
    assert list((tmp_path / "other").iterdir()) == []


def test_damaged_plan_is_deleted_and_the_program_runs(
    script: Path, tmp_path: Path, report: Callable[..., dict[str, Any]]
) -> None:
    report(script, 1)
    [file] = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    assert report(script, 1)["plan_active_at_iteration"] > 5
    assert report(script, 1)["plan_active_at_iteration"] <= 2


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(errno.EROFS, "Read-only file system")


def iterate(pool: Pool, count: int, length: int = 12) -> None:
    for _ in range(count):
        for address in [pool.allocate(1_000 * length + 640 * k) for k in range(length)]:
            pool.free(address)
        pool.step()
        pool.plan_now()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MEMPOOL_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_plan_of_a_changed_program_is_replaced() -> None:
    """The cache keeps the plan that this run made, not the outdated plan that it loaded."""
    for length in (12, 20):
        with Pool(simulated(), background=False, remember=True) as pool:
            iterate(pool, 12, length)
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 3, 20)
        assert pool.loaded is not None
        assert [len(planned.buffers) for planned in pool.loaded.plans] == [20]
        assert pool.report().to_dict()["plan_active_at_iteration"] == 1


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("remember", [False, True])
def test_useless_plans_are_dropped_after_a_stale_remembered_plan(remember: bool) -> None:
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 12)
    with Pool(simulated(), background=False, remember=remember) as pool:
        iterate(pool, 6, 20)
        before = {number for number, _ in pool.client.patterns()}
        assert pool.plans == 1
        sizes = random.Random(1)
        for _ in range(OPTIONS.max_strays + 1000):
            pool.free(pool.allocate(sizes.randrange(600, 100_000)))
        pool.plan_now()
        assert before.isdisjoint(number for number, _ in pool.client.patterns())


def test_a_plan_that_the_device_cannot_replay_is_left_aside(cache: Path) -> None:
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 12)
    device = _core.SimulatedDevice(page=4096, alignment=1 << 14)
    with Pool(device, background=False, remember=True) as pool:
        iterate(pool, 12)
        assert pool.loaded is None
        assert pool.plans == 1
    assert len(files(cache)) == 1


def test_plan_in_a_read_only_folder_is_followed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged plan is ignored, and a plan that cannot be saved does not prevent saving the trace."""
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 12)
    [file] = files(cache)
    for name in ("touch", "unlink"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(Path, "mkdir", lambda path, **_: refuse() if path == file.parent else None)
    trace = cache / "run.trace"
    with Pool(simulated(), background=False, remember=True, record=str(trace)) as pool:
        assert pool.loaded is not None
        iterate(pool, 12, 20)
        assert pool.plans == 1
    assert trace.exists()
    file.write_bytes(file.read_bytes()[:-100])
    with Pool(simulated(), background=False, remember=True) as pool:
        assert pool.loaded is None


def test_pools_of_a_program_have_separate_plans(cache: Path) -> None:
    for name in ("one", "other"):
        with Pool(simulated(), name=name, background=False, remember=True) as pool:
            assert pool.loaded is None
            iterate(pool, 12)
    assert len(files(cache)) == 2


def test_files_unused_for_longest_are_deleted(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = remembered_plans.RememberedPlansOptions(max_files=2)
    monkeypatch.setattr(remembered_plans, "OPTIONS", few)
    for number, name in enumerate(("first", "second", "first", "third")):
        with Pool(simulated(), name=name, background=False, remember=True) as pool:
            iterate(pool, 12, 12 + number)
        for path in files(cache):  # no two files have the same age
            os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 10))
    kept = set()
    for name in ("first", "second", "third"):
        with Pool(simulated(), name=name, background=False, remember=True) as pool:
            kept |= {name} if pool.loaded is not None else set()
    assert kept == {"first", "third"}


@pytest.mark.usefixtures("cache")
def test_a_plan_file_sets_the_remembered_plan_aside(tmp_path: Path) -> None:
    file = str(tmp_path / "own.plan")
    with Pool(simulated(), background=False) as pool:
        iterate(pool, 12, 15)
        pool.save(file)
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 12)
    with Pool(simulated(), background=False, remember=True, plan=file) as pool:
        assert pool.loaded is not None
        assert len(pool.loaded.plans[0].buffers) == 15


@pytest.mark.parametrize(("seconds", "kept"), [(0.0, 1), (1e9, 0)])
def test_plan_of_a_short_run_is_not_kept_unasked(
    cache: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, kept: int
) -> None:
    options = remembered_plans.RememberedPlansOptions(min_seconds=seconds)
    monkeypatch.setattr(remembered_plans, "OPTIONS", options)
    with Pool(simulated(), background=False, remember="long") as pool:
        iterate(pool, 12)
    assert len(files(cache)) == kept


def test_plans_made_in_place_of_remembered_ones_are_not_kept(cache: Path) -> None:
    """Such plans avoid buffers that were alive in one run's arena, and would grow from run to run."""
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 12)
    [file] = files(cache)
    before = file.read_bytes()
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 4)
        [planned] = pool.planner.learner.registry
        pool.planner.learner.builder.install(planned, None, instead_of=planned)
        iterate(pool, 4)
        assert pool.plans == 1
    assert file.read_bytes() == before
    with Pool(simulated(), background=False, remember=True) as pool:
        iterate(pool, 4)
        iterate(pool, 12, 30)
    assert file.read_bytes() != before


@pytest.mark.parametrize(
    "variables",
    [
        {"MEMPOOL_REMEMBER": "0"},
        {"MEMPOOL_REMEMBER": "fresh"},
        {"MEMPOOL_LIMIT": "4GiB"},
        {"MEMPOOL_PLAN": "own.plan"},
        {"MEMPOOL": "record"},
        {"MEMPOOL_MEMORY": "managed"},
        {"RANK": "1", "WORLD_SIZE": "2"},
    ],
    ids=" ".join,
)
def test_rehearsal_whose_plan_the_run_cannot_follow_is_refused(
    script: Path, variables: dict[str, str]
) -> None:
    done = subprocess.run(
        [MEMPOOL, "run", "--rehearse", script, "1"],
        env=os.environ | {"MEMPOOL_REMEMBER": ""} | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "leave " in done.stderr

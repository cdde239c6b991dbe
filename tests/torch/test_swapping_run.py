"""How users reach swapping: ``install(limit=)``, ``mempool run --limit``; which iterations it plans."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from chain import Loop

import mempool.torch
from mempool import Pool, UsageError
from mempool.torch.eager.mode import Swapper
from mempool.torch.eager.reserved_memory import Settling, arena_bytes
from mempool.torch.offload.host_engine import HostEngine
from solvers.swap import Link, OffloadPlanner

if TYPE_CHECKING:
    from collections.abc import Iterator


MIB = 1 << 20
CPU = torch.device("cpu")
FULL = pytest.mark.full


pytestmark = pytest.mark.usefixtures("nothing_is_held")


def losses(sizes: list[int]) -> list[float]:
    loop = Loop()
    return [loop.step(size) for size in sizes]


# --- installing


@pytest.mark.parametrize("limit", ["3MiB", "2MiB"])
def test_with_a_limit_losses_are_the_same_and_the_pool_sees_it_kept(limit: str) -> None:
    """Once a plan is followed, what the pool itself counts as alive stays within the limit."""
    plain = losses([1024] * 8)
    with mempool.torch.install(device="cpu", limit=limit, host_limit="64MiB", background=False) as pool:
        loop = Loop()
        seen = [loop.step() for _ in range(4)]
        pool.client.reset_peaks()
        seen += [loop.step() for _ in range(4)]
        live = pool.client.stats()["live"]["peak"]
        values = pool.report().to_dict()["swapping"]
    assert seen == plain
    assert live <= pool.settings.limit
    assert values["limit_bytes"] == pool.settings.limit
    assert values["planned_peak_bytes"] <= pool.settings.limit < values["unplanned_peak_bytes"]
    assert values["moves"] > 0
    assert values["iterations"] == 8
    assert values["iteration_in_bytes"] > 0
    assert "swapping: limit" in str(pool.report())
    json.dumps(values)


def test_without_a_limit_nothing_is_told_of_swapping() -> None:
    with mempool.torch.install(device="cpu", background=False) as pool:
        assert pool.report().to_dict()["swapping"] is None
        assert "swapping" not in str(pool.report())


def test_the_limit_of_the_environment_is_of_pytorch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMPOOL_LIMIT", "5MiB")
    with Pool(background=False) as plain, mempool.torch.install(device="cpu", background=False) as pool:
        assert plain.report().to_dict()["swapping"] is None
        assert pool.report().to_dict()["swapping"]["limit_bytes"] == 5 * MIB
    with pytest.raises(UsageError, match="max_reserved is for all pools"):
        Pool(background=False, limit="5MiB")


@pytest.mark.parametrize("limit", ["0", "much", -1, True, 1.5, "1.5", "2.5 B"])
def test_an_impossible_limit_is_refused_and_leaves_nothing(limit: object) -> None:
    with pytest.raises(UsageError):
        mempool.torch.install(device="cpu", limit=limit)
    assert not mempool.torch.is_installed()


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({"limit": "2GiB", "max_reserved": "1GiB"}, "max_reserved 1,073,741,824"),
        ({"host_limit": "1GiB"}, "give one too"),
    ],
)
def test_what_does_not_go_together_is_refused_and_leaves_nothing(chosen: dict[str, str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        mempool.torch.install(device="cpu", **chosen)
    assert not mempool.torch.is_installed()


@pytest.mark.parametrize(
    ("options", "variables", "why"),
    [
        (["--limit", "2GiB", "--max-reserved", "1GiB"], {}, "max_reserved 1,073,741,824"),
        ([], {"MEMPOOL_HOST_LIMIT": "1GiB"}, "give one too"),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line_before_the_program_runs(
    options: list[str], variables: dict[str, str], why: str
) -> None:
    command = [sys.executable, "-m", "mempool", "run", *options, "-c", "1"]
    environment = {**os.environ, **variables, "PYTHONPATH": str(Path(mempool.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 2
    assert why in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_all_is_back_when_the_pool_is_closed_whatever_was_entered_since() -> None:
    class Other(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    pool = mempool.torch.install(device="cpu", limit="2MiB", background=False)
    kept = [torch.full((MIB // 8,), float(i)) for i in range(8)]
    with Other():
        pool.close()
        assert [t.untyped_storage().nbytes() for t in kept] == [MIB // 2] * 8
        assert [t.mean().item() for t in kept] == [float(i) for i in range(8)]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


SCRIPT = """
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(*[m for _ in range(6) for m in (torch.nn.Linear(64, 64), torch.nn.Tanh())])
optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
kept = []
for step in range(6):
    loss = net(torch.randn(2048, 64)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    kept.append(loss.detach())
    print(loss.item().hex())
{end}
"""


@pytest.mark.parametrize(
    "end", [pytest.param("", marks=FULL), pytest.param("raise SystemExit(3)", marks=FULL), "1 / 0"]
)
def test_an_unmodified_program_runs_within_a_limit_and_ends_as_it_does(tmp_path: Path, end: str) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(end=end))
    folder = str(Path(mempool.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": folder}

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command, "train.py"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )

    plain = run()
    swapped = run("-m", "mempool", "run", "--quiet", "--json", "report.json", "--limit", "4MiB")
    assert (swapped.stdout, swapped.returncode) == (plain.stdout, plain.returncode), swapped.stderr
    assert swapped.stderr == plain.stderr
    values = json.loads((tmp_path / "report.json").read_text())["pools"]["torch"]["swapping"]
    assert values["limit_bytes"] == 4 * MIB
    assert values["moves"] > 0


def test_a_limit_that_is_none_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent("print(1)"))
    command = [sys.executable, "-m", "mempool", "run", "--limit", "much", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(mempool.__file__).parents[1])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 2
    assert "'much' is not a size in bytes" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


# --- iterations


@pytest.fixture
def swapper() -> Iterator[Swapper]:
    engine = HostEngine(64 * MIB)
    with Swapper(engine, CPU, 2 * MIB) as swapper:
        yield swapper
    engine.close()


def test_one_odd_iteration_keeps_the_plan_and_two_alike_make_another(swapper: Swapper) -> None:
    loop, iterations = Loop(), swapper.iterations
    for _ in range(3):
        loop.step()
    assert iterations.plan is not None
    tape = iterations.plan.tape  # stays where copies only come sooner
    for size in (1536, 1024, 2048, 1024):
        loop.step(size)
        assert iterations.plan.tape is tape
    assert swapper.counts.diverged - 1 == 2  # the first two iterations differ by the momentum that begins
    loop.step(1280)
    loop.step(1280)
    assert iterations.plan.tape is not tape
    made = swapper.counts.plans
    loop.step(1280)
    assert swapper.counts.plans == made


def test_losses_of_batches_of_any_size_are_the_same(swapper: Swapper) -> None:
    sizes = [1024, 1024, 1024, 1, 2048, 1024, 512, 512, 512, 1024]
    swapper.__exit__(None, None, None)
    plain = losses(sizes)
    swapper.__enter__()
    assert losses(sizes) == plain
    assert swapper.counts.out_bytes > 0


def test_marks_of_the_program_win_over_the_steps_of_optimizers() -> None:
    with mempool.torch.install(device="cpu", limit="4MiB", background=False) as pool:
        loop = Loop()
        for _ in range(3):
            with pool.iteration():
                loop.step()
                loop.step()  # the second half of the same
        assert pool.report().to_dict()["swapping"]["iterations"] in (3, 4)  # the first may have been found
    with mempool.torch.install(device="cpu", limit="4MiB", background=False) as pool:
        loop = Loop()
        watched = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], 1.0)
        pool.watch(watched)
        for _ in range(4):
            loop.step()
        assert pool.report().to_dict()["swapping"]["iterations"] == 0
        watched.step()
        assert pool.report().to_dict()["swapping"]["iterations"] == 1


def test_of_two_optimizers_the_first_ends_iterations(swapper: Swapper) -> None:
    loop, other = Loop(), Loop()
    for _ in range(5):
        loop.step()
        other.step()
    assert swapper.counts.iterations == 5


def test_what_cannot_be_held_is_told_once_and_the_least_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    plain = losses([1024] * 6)
    engine = HostEngine(64 * MIB)
    with caplog.at_level("WARNING"), Swapper(engine, CPU, MIB // 4) as swapper:
        assert losses([1024] * 6) == plain
        plan = swapper.iterations.plan
    engine.close()
    assert plan is not None
    assert plan.swap.limit_bytes > MIB // 4
    assert plan.swap.peak_bytes < plan.recorded.step.peak_bytes
    assert len(caplog.records) == 1
    assert "262,144 B (256 KiB)" in caplog.text
    assert "operation" in caplog.text


def test_a_loop_that_marks_nothing_is_found_and_planned(swapper: Swapper) -> None:
    """Inferences with more weights than may be here: they come in turn, before they are needed."""
    weights = [torch.full((256, 256), i / 1e5) for i in range(12)]
    x = torch.ones(16, 256)

    def work() -> float:
        with torch.inference_mode():
            y = x
            for weight in weights:
                y = torch.tanh(y @ weight) + 1
            return float(y.sum() * y.mean())

    first = work()
    assert [work() for _ in range(60)] == [first] * 60
    counts, plan = swapper.counts, swapper.iterations.plan
    assert plan is not None
    assert len(plan) >= 36  # all of them, not one layer
    on_demand, iterations = counts.on_demand, counts.iterations
    work()
    assert counts.iterations == iterations + 1
    assert counts.on_demand - on_demand <= 1


def test_what_no_operation_touches_is_away_and_the_limit_is_that_of_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such as an average of a model, or the data of an evaluation."""
    idle = [torch.randn(MIB) for _ in range(4)]
    sums = [one.sum().item() for one in idle]
    engine = HostEngine(64 * MIB)
    with caplog.at_level("WARNING"), Swapper(engine, CPU, 3 * MIB) as swapper:
        assert [one.sum().item() for one in idle] == sums  # now it knows them
        assert losses([1024] * 6) == losses([1024] * 6)
        plan = swapper.iterations.plan
        assert plan is not None
        assert plan.swap.limit_bytes <= 3 * MIB
        assert [one.sum().item() for one in idle] == sums
    engine.close()
    assert not caplog.records


def test_a_tape_ends_although_nothing_repeats(swapper: Swapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mempool.torch.eager.iteration_detector._MOST", 128)
    x, choices = torch.ones(10), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _ in range(400):
            x = x + 1 if torch.rand((), generator=choices) < 0.5 else x * 1
            assert len(swapper.iterations.tape) <= 128


def test_copies_that_were_waited_for_are_asked_for_sooner(swapper: Swapper) -> None:
    """A copy engine that is slower than it said: copies back move until they wait less, or may no further."""
    loop, iterations = Loop(), swapper.iterations
    for _ in range(3):
        loop.step()
    plan = iterations.plan
    assert plan is not None
    moves = range(len(plan.swap.schedule))
    waits = {id(move): 1e-2 for move in moves}
    swapper.engine.waited = lambda transfer: waits.get(id(transfer), 0.0)  # type: ignore[method-assign]
    better = iterations._planning.changed(plan, [(move, move) for move in moves], 1 << 40)
    assert better is not None
    assert (better.swap.schedule.fetch <= plan.swap.schedule.fetch).all()
    assert (better.swap.schedule.fetch < plan.swap.schedule.fetch).any()
    none = iterations._planning.changed(plan, [(move, object()) for move in moves], 1 << 40)
    assert none is None


class Behind(HostEngine):
    """An engine of which nobody knows what was waited for until an iteration later, as on a GPU."""

    streams = True

    def __init__(self) -> None:
        super().__init__(64 * MIB)
        self.now: list[Any] = []
        self.known: list[Any] = []

    def wait(self, transfer: Any) -> float:
        super().wait(transfer)
        self.now.append(transfer)
        return 0.0

    def waited(self, transfer: Any) -> float:
        return 1e-2 * any(transfer is one for one in self.known)

    def end_iteration(self) -> None:
        super().end_iteration()
        self.known, self.now = self.now, []


def test_what_a_stream_waited_for_is_counted_and_heeded_when_the_device_has_come_to_it() -> None:
    plain = losses([1024] * 8)
    engine = Behind()
    with Swapper(engine, CPU, 2 * MIB) as swapper:
        assert losses([1024] * 8) == plain
        assert swapper.counts.waits > 0
        assert swapper.counts.waited_seconds >= 1e-2
        assert swapper.counts.changes > 0
    engine.close()


# --- what the pool reserves


class FakePool:
    """A client that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def enter_dynamic(self) -> None:
        self.told.append("dynamic")

    def leave_dynamic(self) -> None:
        self.told.append("learn")

    def give_back(self) -> None:
        self.told.append("give back")


def test_a_pool_learns_only_when_the_moves_have_settled_and_not_while_they_change() -> None:
    pool = FakePool()
    settling = Settling(pool)  # type: ignore[arg-type]
    settling.went_by_plan()
    settling.changed()
    for _ in range(2):
        settling.went_by_plan()
    assert pool.told == ["dynamic"]
    for _ in range(9):
        settling.went_by_plan()
    assert pool.told == ["dynamic", "give back", "learn"]
    settling.changed()
    settling.end()
    settling.end()
    assert pool.told[3:] == ["dynamic", "give back", "learn"]


def test_moves_leave_so_little_that_the_arena_with_its_gaps_is_within_the_limit() -> None:
    """Of a loop whose plan for the limit itself would take more."""
    engine = HostEngine(MIB)
    with Swapper(engine, CPU, 1 << 40) as swapper:
        loop = Loop()
        for _ in range(3):
            loop.step()
        plan = swapper.iterations.plan
    engine.close()
    assert plan is not None
    step, planning = plan.recorded.step, swapper.iterations._planning
    planner = OffloadPlanner(step, Link.of_rate(4e9))
    tried = 0
    for part in range(95, 50, -3):
        limit = step.peak_bytes * part // 100
        swap = planner.nearest(limit)
        if swap.limit_bytes > limit or arena_bytes(step, swap.schedule, 64) <= limit:
            continue
        tried += 1
        fits = planning._fitting(planner, step, limit)
        assert arena_bytes(step, fits.schedule, 64) < arena_bytes(step, swap.schedule, 64)
    assert tried

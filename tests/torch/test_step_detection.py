"""Without marks, the steps of an optimizer end iterations, from the first step on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answers import Cli

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.optim.optimizer import register_optimizer_step_post_hook

import mempool.torch
from mempool.planning.options import OPTIONS
from traces import EventType
from traces.formats.parquet import read_trace

LENGTHS = (1, 2, 3, 5, 8)


@pytest.fixture
def pool(one_thread: None) -> Iterator[mempool.torch.TensorPool]:
    with mempool.torch.install(device="cpu", background=False) as made:
        yield made


class Training:
    """A small network trained on batches of random sizes, with an optional second optimizer."""

    def __init__(self, draw: Callable[[], int], optimizers: int = 1) -> None:
        torch.manual_seed(0)
        self._draw = draw
        self._networks = [self._network() for _ in range(optimizers)]
        self.optimizers = [torch.optim.AdamW(network.parameters()) for network in self._networks]

    @staticmethod
    def _network() -> Any:
        return torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(5)])

    def step(self) -> str:
        total = 0.0
        for network, optimizer in zip(self._networks, self.optimizers, strict=True):
            optimizer.zero_grad()
            loss = network(torch.randn(64 * self._draw(), 96)).square().mean()
            loss.backward()
            optimizer.step()
            total += float(loss.detach())
        return total.hex()


def drawn(seed: int = 1) -> Callable[[], int]:
    chance = random.Random(seed)
    return lambda: chance.choice(LENGTHS)


def trained(pool: mempool.torch.TensorPool, training: Training, steps: int) -> tuple[list[str], float]:
    """Run steps; return their losses and hit rate."""
    before = dict(pool.client.stats()["outcomes"])
    losses = []
    for _ in range(steps):
        losses.append(training.step())
        pool.plan_now()
    new = {outcome: count - before[outcome] for outcome, count in pool.client.stats()["outcomes"].items()}
    return losses, float(new["hit"] / sum(new.values()))


def is_marked(pool: mempool.torch.TensorPool) -> bool:
    return bool(pool.client.state()["marked"])


def test_metrics_count_optimizer_steps(pool: mempool.torch.TensorPool) -> None:
    training = Training(lambda: 2)
    trained(pool, training, 12)
    metrics = pool.metrics()
    assert (metrics["steps"], metrics["periods"]) == (12, 0)
    assert 1 < metrics["planned_from"] < 12
    pool.watch(training.optimizers[0])
    trained(pool, training, 3)
    assert pool.metrics()["steps"] == 15


def test_unordered_lengths_are_planned_without_marks_and_identical(one_thread: None) -> None:
    training = Training(drawn())
    expected = [training.step() for _ in range(220)]
    with mempool.torch.install(device="cpu", background=False) as pool:
        training = Training(drawn())
        found = trained(pool, training, 160)[0]
        assert is_marked(pool)
        last, share = trained(pool, training, 60)
        assert share > 0.97
        assert len(pool.client.patterns()) >= len(LENGTHS)
    assert [*found, *last] == expected


def test_every_step_from_the_first_ends_an_iteration(pool: mempool.torch.TensorPool) -> None:
    trained(pool, Training(lambda: 2), 3)
    assert pool.client.state()["marks"] == 3
    assert trained(pool, Training(lambda: 2), 30)[1] > 0.9


def test_cells_of_a_closure_are_no_iterations(
    pool: mempool.torch.TensorPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step of LBFGS runs the model many times, and the model its cell; there is no limit."""
    monkeypatch.setattr("mempool.planning.learner.OPTIONS", dataclasses.replace(OPTIONS, max_unmarked=64))
    cell, plans = torch.nn.LSTMCell(256, 256), []
    optimizer = torch.optim.LBFGS(cell.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        state = torch.zeros(8, 256), torch.zeros(8, 256)
        for _ in range(30):
            state = cell(state[0], state)
        loss = state[0].square().mean() + state[1].mean()
        loss.backward()
        plans.append(pool.plan_now())
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert len(plans) > 4
    assert not any(plans)
    assert pool.report().to_dict()["iterations"] == 2


def test_plans_from_before_the_first_step_are_dropped_at_its_begin(
    pool: mempool.torch.TensorPool,
) -> None:
    training = Training(lambda: 2)
    with torch.no_grad():
        for _ in range(8):
            training._networks[0](torch.ones(640, 96))
            pool.plan_now()
    assert pool.client.patterns()
    seen = []
    hook = training.optimizers[0].register_step_pre_hook(lambda *_: seen.append(pool.client.patterns()))
    training.step()
    hook.remove()
    assert seen == [[]]


@pytest.mark.parametrize(("optimizers", "watched"), [(1, True), (2, False)])
def test_first_of_several_optimizers_or_the_watched_optimizer_alone_ends_iterations(
    pool: mempool.torch.TensorPool, optimizers: int, watched: bool
) -> None:
    """Marks of the program and detected steps together would cut each iteration in two."""
    training = Training(drawn(), optimizers=optimizers)
    trained(pool, training, 100)
    assert is_marked(pool)
    if watched:
        pool.watch(training.optimizers[0])
    before = pool.client.state()["marks"]
    training.step()
    assert pool.client.state()["marks"] == before + 1


def test_marked_program_is_left_unchanged(pool: mempool.torch.TensorPool) -> None:
    training = Training(drawn())
    pool.step()
    trained(pool, training, 100)
    assert pool.client.state()["marks"] == 1


@pytest.mark.parametrize("what", ["step", "watch", "iteration", "close"])
def test_hooks_of_the_program_stay_undisturbed(what: str) -> None:
    """PyTorch iterates over its hooks while it calls them."""
    pool = mempool.torch.install(device="cpu", background=False)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told = []

    def call(*_: Any) -> None:
        if what == "iteration":
            with pool.iteration():
                pass
        elif what == "watch":
            pool.watch(torch.optim.SGD(model.parameters(), 0.1))
        else:
            getattr(pool, what)()

    hooks = [register_optimizer_step_post_hook(hook) for hook in (call, lambda *_: told.append(1))]
    try:
        for _ in range(3):
            model(torch.randn(8, 64)).sum().backward()
            optimizer.step()
        assert len(told) == 3
    finally:
        for hook in hooks:
            hook.remove()
        if what != "close":
            pool.close()


@pytest.mark.parametrize("mode", ["replay", "record"])
def test_trace_shows_optimizer_steps_from_the_first(mode: Any, tmp_path: Path, one_thread: None) -> None:
    steps = 12
    with mempool.torch.install(device="cpu", background=False, mode=mode, record=str(tmp_path / "run.trace")):
        training = Training(drawn(), optimizers=2)
        for _ in range(steps):
            training.step()
    trace = read_trace(tmp_path / "run.trace")
    marks = np.flatnonzero(trace.kind == EventType.MARK)
    assert [trace.names[name] for name in trace.operation[marks]] == steps * ["optimizer step"]
    between = np.diff(np.searchsorted(np.flatnonzero(trace.kind == EventType.ALLOC), marks))
    assert (between > 0).all()


def test_recorded_lengths_are_planned_from_the_file(tmp_path: Path, cli: Cli, one_thread: None) -> None:
    """Without marks, another order of lengths follows the plan from the second step on."""
    file, plan = str(tmp_path / "run.trace"), str(tmp_path / "run.plan")
    with mempool.torch.install(device="cpu", background=False, mode="record", record=file):
        training = Training(drawn())
        for _ in range(60):
            training.step()
    cli.run("plan", file, "-o", plan)
    training = Training(drawn(seed=2))
    expected = [training.step() for _ in range(40)]
    with mempool.torch.install(device="cpu", background=False, plan=plan) as pool:
        training = Training(drawn(seed=2))
        found = [training.step()]
        before = dict(pool.client.stats()["outcomes"])
        found += [training.step() for _ in range(39)]
        now = pool.client.stats()["outcomes"]
        missed = {outcome: now[outcome] - before[outcome] for outcome in now if outcome != "hit"}
        assert sum(missed.values()) == 0, missed
        assert now["hit"] > before["hit"]
    assert found == expected


def test_plan_of_an_estimate_is_followed_by_the_unmarked_program(
    tmp_path: Path, cli: Cli, one_thread: None
) -> None:
    file, plan = tmp_path / "fit.trace", tmp_path / "fit.plan"
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(96, 96) for _ in range(5)])\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "for _ in range(4):\n"
        "    optimizer.zero_grad()\n"
        "    model(torch.randn(320, 96)).square().mean().backward()\n"
        "    optimizer.step()\n"
    )
    cli.run(f"fit {script} --main --device cpu --trace {file}")
    cli.run("plan", str(file), "-o", str(plan))
    with mempool.torch.install(device="cpu", background=False, plan=str(plan)) as pool:
        training = Training(lambda: 5)
        training.step()
        before = pool.client.stats()["outcomes"]
        for _ in range(3):
            training.step()
        missed = {k: n - before[k] for k, n in pool.client.stats()["outcomes"].items() if n > before[k]}
        hits = missed.pop("hit")
        assert hits >= 0.75 * (hits + sum(missed.values())), missed
        assert pool.report().to_dict()["iterations"] == 4


def planned_from(tmp_path: Path, cli: Cli, program: Callable[[], None], **options: Any) -> dict[str, Any]:
    """Return the answer of ``mempool plan`` for a program's trace."""
    file = str(tmp_path / "run.trace")
    with mempool.torch.install(device="cpu", background=False, record=file, **options):
        program()
    return cli.answer("plan", file)


@pytest.mark.parametrize("then", ["inference", "another optimizer"])
def test_rare_steps_decide_nothing(tmp_path: Path, cli: Cli, one_thread: None, then: str) -> None:
    """The most frequent repetition is planned, as without an optimizer."""
    training = Training(lambda: 2)

    def program() -> None:
        for _ in range(3):
            training.step()
        if then == "another optimizer":
            training.optimizers.append(torch.optim.SGD(training._networks[0].parameters(), 1e-3))
            kept, training.optimizers = training.optimizers, training.optimizers[1:]
            for _ in range(50):
                training.step()
            assert kept
        else:
            with torch.no_grad():
                for _ in range(300):
                    training._networks[0](torch.ones(64, 96))

    assert planned_from(tmp_path, cli, program)["iterations"] >= 45


def test_each_step_is_shown_once_within_a_limit(tmp_path: Path, cli: Cli, one_thread: None) -> None:
    training = Training(drawn())

    def program() -> None:
        for _ in range(40):
            training.step()

    planned_from(tmp_path, cli, program, limit="64MiB")
    trace = read_trace(tmp_path / "run.trace")
    marks = np.flatnonzero(trace.kind == EventType.MARK)
    assert {trace.names[name] for name in trace.operation[marks]} <= {"optimizer step"}
    between = np.diff(np.searchsorted(np.flatnonzero(trace.kind == EventType.ALLOC), marks))
    assert (between > 0).all()

"""Training with irregular steps within a limit has bit-identical results."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from diverging import SCENARIOS, Loop
from training import digest

import mempool.torch
from solvers.errors import PlanError

#: Number of steps, which includes the irregular ones.
NUMBERS = (0, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 20, 21)
#: Scenarios tested by default.
BRIEF = ("last_batch", "exception")
SHARE = 0.5  # the limit, as a fraction of the peak load
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def peak() -> int:
    """Return the peak live bytes of a regular step."""
    with mempool.torch.install(device="cpu", mode="record") as pool:
        loop = Loop(pool)
        for number in range(3):
            loop.step(number)
        return int(pool.client.stats()["live"]["peak"])


def run_scenario(scenario: str, limit: int) -> list[Any]:
    """Run a scenario within a limit (0: none); return losses, the digest of the model, and kept results."""
    options: dict[str, Any] = {"limit": limit} if limit else {}
    with mempool.torch.install(device="cpu", mode="record", **options) as pool:
        torch.manual_seed(0)
        loop = Loop(pool)
        for number in NUMBERS:
            SCENARIOS[scenario](loop, number)
        if limit:
            assert pool.report().to_dict()["swapping"]["out_bytes"] > 0
    return [loop.losses, digest(loop.model), [kept for kept in loop.kept if isinstance(kept, (str, int))]]


@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=() if name in BRIEF else pytest.mark.full) for name in SCENARIOS]
)
def test_results_are_identical_in_diverging_iterations(scenario: str, peak: int) -> None:
    plain = run_scenario(scenario, 0)
    assert run_scenario(scenario, int(SHARE * peak)) == plain


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("recorded_step", PlanError),
        ("reduce_fragmentation", ZeroDivisionError),
        ("schedule_of", ZeroDivisionError),
        ("advance_reloads", PlanError),
        pytest.param("recorded_step", ZeroDivisionError, marks=pytest.mark.full),
        pytest.param("reduce_fragmentation", PlanError, marks=pytest.mark.full),
        pytest.param("schedule_of", PlanError, marks=pytest.mark.full),
        pytest.param("advance_reloads", ZeroDivisionError, marks=pytest.mark.full),
    ],
)
def test_failed_planning_does_not_end_training(
    part: str,
    kind: type[Exception],
    peak: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tried = []

    def fails(*_: object, **__: object) -> None:
        tried.append(part)
        raise kind("too hard")

    plain = run_scenario("exception", 0)
    monkeypatch.setattr(f"mempool.torch.eager.schedule_planner.{part}", fails)
    if part == "advance_reloads":  # called only after waits for copies
        monkeypatch.setattr("mempool.torch.offload.host_engine.HostEngine.waited", lambda *_: 1.0)
    assert run_scenario("exception", int(SHARE * peak)) == plain
    assert tried
    assert len(tried) <= 3
    (warning,) = [record for record in caplog.records if "no plan of swaps" in record.message]
    assert "too hard" in warning.message
    assert bool(warning.exc_info) == (kind is not PlanError)

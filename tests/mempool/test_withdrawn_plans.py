"""Unprofitable plans are withdrawn with one log line, and made again after a pause."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from pools import simulated

from mempool import Pool, _core


def run(pool: Pool, sizes: list[int]) -> None:
    """Run one marked iteration and the planner."""
    for address in [pool.allocate(size) for size in sizes]:
        pool.free(address)
    pool.step()
    pool.plan_now()


SIZES = [10_000 + 640 * k for k in range(20)]


def planned(pool: Pool) -> None:
    for _ in range(8):
        run(pool, SIZES)
    assert pool.state == "replaying"


def mixed(pool: Pool, share: float, count: int) -> None:
    """Run iterations in which a fraction of the requests follows the plan, followed by other sizes."""
    chance = random.Random(0)
    for _ in range(count):
        follow = int(share * len(SIZES))
        run(pool, SIZES[:follow] + [chance.randrange(50_000, 90_000) for _ in SIZES[follow:]])


@pytest.fixture
def pool() -> Any:
    with Pool(simulated(), background=False) as made:
        yield made


def test_plan_with_few_hits_is_withdrawn_in_a_line(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    planned(pool)
    mixed(pool, 0.5, 30)
    assert pool.state == "dynamic"
    assert [line for line in caplog.messages if "withdrawn" in line] == [
        "the plan is withdrawn: 50% of the requests hit in its last 4 iterations"
    ]
    assert "withdrawn" in [entry["decision"] for entry in pool.client.decisions()]
    assert "did not pay" in pool.explain()
    assert "no plan after 38 steps: it was withdrawn, as it did not pay: 50%" in pool.report().verdict


def test_plan_with_many_hits_stays(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    planned(pool)
    mixed(pool, 0.7, 30)
    assert pool.state == "replaying"
    assert not caplog.messages


def test_withdrawn_plan_is_made_again_after_a_pause(pool: Pool) -> None:
    planned(pool)
    mixed(pool, 0.0, 30)
    assert pool.state == "dynamic"
    states = []
    while len(states) < 200 and "replaying" not in states:
        run(pool, SIZES)
        states.append(pool.state)
    assert 4 < len(states) < 200


def test_plan_that_the_user_gave_stays(tmp_path: Path) -> None:
    with Pool(simulated(), background=False) as pool:
        planned(pool)
        pool.save(tmp_path / "run.plan")
    with Pool(simulated(), background=False, plan=str(tmp_path / "run.plan")) as pool:
        planned(pool)
        mixed(pool, 0.3, 30)
        assert pool.state == "replaying"


@pytest.mark.parametrize(
    ("before", "after", "withdrawn"),
    [(0.010, 0.011, True), (0.010, 0.0104, False), (0.010, 0.005, False), (0.0, 0.011, False)],
)
def test_plan_that_makes_iterations_slower_is_withdrawn(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, before: float, after: float, withdrawn: bool
) -> None:
    planned(pool)
    learner = pool.planner.learner
    for _ in range(_core.LEARNING_ITERATIONS):
        run(pool, SIZES)

    class Slowly:
        """A client that reports other times; 0: unknown."""

        def __getattr__(self, name: str) -> Any:
            return getattr(pool.client, name)

        def results(self) -> Any:
            return [(0, 20, before)] * 6, [(20, 0, 2 * after)] * 63 + [(20, 0, after)]

    monkeypatch.setattr(learner, "_client", Slowly())
    monkeypatch.setattr(learner, "_timed_plans", 0)
    learner.drop_if_useless()
    assert (pool.state == "dynamic") == withdrawn


def test_time_of_the_planner_is_not_an_iterations_time(pool: Pool) -> None:
    client = pool.client
    pool.step()
    for ignored in (False, True):
        pool.free(pool.allocate(1000))
        if ignored:
            client.ignore_time()
        pool.step()
        assert (client.results()[0][0][2] == 0) == ignored


def test_plan_that_deserves_a_look_hides_no_news_from_the_planner(pool: Pool) -> None:
    """Each iteration that departs from a plan wakes the planner, which then looks at the recording, too."""
    run(pool, SIZES)
    for address in [pool.allocate(size) for size in SIZES]:
        pool.free(address)
    pool.step()
    pool.client.wake()
    assert pool.client.wait_for_work(1e-6, search_seconds=1.0)[0]

"""Training within a limit is bit-identical, and an external observer counts at most the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from test_training import PAIRS, needs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    TrainedAll = Callable[[str, list[dict[str, Any]]], list[dict[str, Any]]]

NAMES = ["-".join(map(str, setup.values())) for setup in PAIRS]
#: Limits as fractions of the peak load: those of the models in turn, and those of each setup.
SHARES = (0.7, 0.85, 0.6)
DEAR_SHARES = (0.95, 0.8, 0.6, 0.4, 0.2, 0.05)
#: Number of first steps, in which the workspaces of operations are still unknown.
SETTLED = 3
#: Number of steps after which most operations bypass the mode if the limit is twice the peak.
CALM = 14
#: Cheap choices of `test_training`; the pairs include each model.
FEW: tuple[dict[str, Any], ...] = (
    {"model": "unet", "optimizer": "sgd", "checkpointing": True, "marks": "watch"},
    {"model": "gpt", "autocast": True, "checkpointing": True, "marks": "iteration"},
    {"model": "bert", "accumulate": 2, "workers": 2, "marks": "step"},
)


class Trainings:
    """Setups trained in one process without the pool and in another with the pool."""

    def __init__(self, trained_all: TrainedAll, observer: str, setups: Sequence[dict[str, Any]]) -> None:
        self.brief = [{**setup, "steps": 7, "size": 2} for setup in setups]
        self.watched = [{**setup, "observer": observer} for setup in self.brief]
        self._trained_all = trained_all
        self.plain = trained_all("plain", self.brief)
        pooled = trained_all("pool", [{**setup, "steps": 3} for setup in self.watched])
        self.peaks = [max(result["peaks"]) for result in pooled]

    def within(self, shares: Sequence[tuple[int, float]]) -> list[dict[str, Any]]:
        """Return the results of setups within fractions of their peak loads."""
        setups = [{**self.watched[at], "limit": int(share * self.peaks[at])} for at, share in shares]
        return self._trained_all("pool", setups)


def check(plain: dict[str, Any], said: dict[str, Any], record: int) -> None:
    """Assert equal results, and memory within the limit once steps repeat."""
    assert said["losses"] == plain["losses"]
    assert said["parameters"] == plain["parameters"]
    assert said["overlaps"] == 0
    assert said["report"]["swapping"]["out_bytes"] > 0
    # workspaces of operations are learned
    assert max(said["peaks"][SETTLED:]) <= 1.02 * record, said


@pytest.fixture(scope="module")
def trainings(trained_all: TrainedAll, observer: str) -> Trainings:
    for setup in FEW:
        needs(setup)
    return Trainings(trained_all, observer, FEW)


@pytest.fixture(scope="module")
def limited(trainings: Trainings) -> list[dict[str, Any]]:
    return trainings.within([(at, SHARES[at % len(SHARES)]) for at in range(len(FEW))])


@pytest.mark.parametrize("at", range(len(FEW)), ids=[setup["model"] for setup in FEW])
def test_training_within_a_limit_is_bit_identical_and_keeps_the_limit(
    trainings: Trainings, limited: list[dict[str, Any]], at: int
) -> None:
    check(trainings.plain[at], limited[at], limited[at]["report"]["swapping"]["limit_bytes"])


def check_bypassed(trained_all: TrainedAll, trainings: Trainings) -> None:
    """Check for identical results within an ample limit, where most operations skip the mode."""
    plain = trained_all("plain", [{**setup, "steps": CALM} for setup in trainings.brief])
    ample = [
        {**setup, "steps": CALM, "limit": 2 * peak}
        for setup, peak in zip(trainings.watched, trainings.peaks, strict=True)
    ]
    for expected, result in zip(plain, trained_all("pool", ample), strict=True):
        assert result["losses"] == expected["losses"]
        assert result["parameters"] == expected["parameters"]
        assert result["overlaps"] == 0
        assert result["report"]["swapping"]["bypassed"] > 0


@pytest.mark.full
def test_bypassed_training_is_bit_identical(trained_all: TrainedAll, trainings: Trainings) -> None:
    check_bypassed(trained_all, trainings)


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("setup", PAIRS, ids=NAMES)
def test_pairs_of_options_are_bit_identical_with_bypass(
    trained_all: TrainedAll, observer: str, setup: dict[str, Any]
) -> None:
    needs(setup)
    check_bypassed(trained_all, Trainings(trained_all, observer, [setup]))


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, trained_all: TrainedAll, observer: str) -> Trainings:
    """Return the trainings of a setup, which is used for all its limits."""
    needs(request.param)
    return Trainings(trained_all, observer, [request.param])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("share", DEAR_SHARES)
@pytest.mark.parametrize("pair", PAIRS, ids=NAMES, indirect=True)
def test_pairs_of_options_are_bit_identical_within_any_limit(pair: Trainings, share: float) -> None:
    said = pair.within([(0, share)])[0]
    swapping = said["report"]["swapping"]
    check(pair.plain[0], said, max(swapping["limit_bytes"], swapping["planned_peak_bytes"]))

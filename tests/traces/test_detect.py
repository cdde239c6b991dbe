"""Search for the period that explains the whole tail, exactly and in linear time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traces.iterations.detect import Detector, Period, tail_period


def by_hand(values: list[int], repeats: int) -> Period | None:
    """Try every tail and every period, longest tail first: cubic, and plainly right."""
    n = len(values)
    for length in range(n, 0, -1):
        tail = values[n - length :]
        for period in range(1, length // repeats + 1):
            if tail[period:] == tail[: length - period]:
                return Period(period, length, n - length)
    return None


FEW = st.lists(st.integers(0, 2), max_size=24)


@given(FEW, st.integers(2, 4))
def test_tail_period_matches_brute_force(values: list[int], repeats: int) -> None:
    assert tail_period(values, min_repeats=repeats) == by_hand(values, repeats)


@given(FEW, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(2, 5), st.integers(0, 5))
def test_repetition_is_found_despite_warm_up_and_partial_last_iteration(
    warm_up: list[int], unit: list[int], repeats: int, partial: int
) -> None:
    values = warm_up + unit * repeats + unit[: partial % len(unit)]
    found = tail_period(values)
    assert found is not None
    assert found.length >= repeats * len(unit)
    assert found == by_hand(values, 2)


def test_gradient_accumulation_gives_way_from_the_nested_to_the_whole_period() -> None:
    a, b = [1, 2, 3], [7, 8]
    assert tail_period(a * 3) == Period(3, 9, 0)
    assert tail_period(a * 3 + b) is None
    assert tail_period((a * 3 + b) * 2) == Period(11, 22, 0)
    assert tail_period((a * 3 + b) * 2 + a * 2) == Period(11, 28, 0)


def test_no_period_is_found_without_repetition() -> None:
    assert tail_period(np.arange(1000)) is None
    assert tail_period([]) is None
    assert tail_period([5]) is None


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="min_repeats"):
        tail_period([1, 1], min_repeats=1)
    with pytest.raises(TypeError, match="float64"):
        tail_period([1.0, 1.0])
    for arguments in ({"min_repeats": 1}, {"capacity": 31}, {"min_length": 0}):
        with pytest.raises(ValueError, match="needs"):
            Detector(**arguments)


@pytest.mark.parametrize("unit", [[0], [0, 1], [0] * 999 + [1], list(range(50_000))])
def test_tail_period_of_a_million_values_takes_linear_time(unit: list[int]) -> None:
    values = np.tile(unit, 1_000_000 // len(unit))
    begin = time.thread_time()
    found = tail_period(values)
    assert time.thread_time() - begin < 5  # seconds: hundredths on an idle machine, minutes in quadratic time
    assert found == Period(len(unit), len(values), 0)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=60),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.integers(0, 12),
    st.data(),
)
def test_detector_result_is_independent_of_the_pieces(
    warm_up: list[int], unit: list[int], repeats: int, data: st.DataObject
) -> None:
    values = warm_up + unit * repeats
    one, other = Detector(capacity=64, min_length=8), Detector(capacity=64, min_length=8)
    one.extend(values)
    while values:
        cut = data.draw(st.integers(1, 40))
        other.extend(values[:cut])
        values = values[cut:]
    assert one.found == other.found
    assert one.count == other.count


@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 100), st.integers(1, 8))
def test_detector_finds_a_unit_within_four_iterations_and_a_quarter_of_the_warm_up(
    warm_up: list[int], size: int, seed: int
) -> None:
    unit = np.random.default_rng(seed).permutation(size) + 100
    detector = Detector()
    detector.extend(warm_up)
    enough = (len(warm_up) + max(2 * size, 32)) * 5 // 4 + 2 - len(warm_up)
    found = detector.extend(np.resize(unit, enough))
    assert found is not None
    assert found.period == size
    assert found.start in range(len(warm_up) + 1)


def test_longer_period_replaces_a_nested_period_for_good() -> None:
    inner, step = list(range(10)), list(range(100, 120))
    detector = Detector()
    assert detector.extend(inner * 10).period == 10
    for _ in range(8):
        detector.extend(step + inner * 10)
    assert detector.found.period == 120
    for _ in range(20):  # a search may now run anywhere within the iteration
        detector.extend(step + inner * 10)
        assert detector.found.period == 120


def test_detector_follows_a_lasting_change_of_the_program() -> None:
    detector = Detector(capacity=1000)
    detector.extend(np.resize(np.arange(40), 2000))
    assert detector.found.period == 40
    detector.extend(np.resize(np.arange(500, 570), 2000))
    assert detector.found.period == 70
    detector.reset()
    assert detector.found is None
    assert detector.count == 0
    assert detector.extend([1] * 32) == Period(1, 32, 0)


def test_tail_index_counts_from_the_first_value_ever() -> None:
    detector = Detector(capacity=128)
    found = detector.extend(np.concatenate([np.arange(10_000), np.resize(np.arange(5), 10_000)]))
    assert found.period == 5
    assert found.start + found.length <= detector.count
    assert found.start >= 10_000


def test_a_program_that_never_repeats_costs_bounded_memory_and_ever_fewer_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import traces.iterations.detect as module

    looks: list[int] = []

    def counted(values: np.ndarray, *, min_repeats: int) -> Period | None:
        looks.append(len(values))
        return tail_period(values, min_repeats=min_repeats)

    monkeypatch.setattr(module, "tail_period", counted)
    detector = Detector(capacity=1024)
    rng = np.random.default_rng(0)
    for _ in range(200):
        detector.extend(rng.integers(0, 2**62, 1000))
    assert detector.found is None
    assert max(looks) == 1024
    assert sum(looks) < 200_000 / 2
    assert detector._values.nbytes <= 2 * 1024 * 8

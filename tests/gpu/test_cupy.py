"""Tests of CuPy on a GPU: the checks of cupy_checks.py."""

from __future__ import annotations

import pytest
import runs

from mempool.demo.race import race

CHECKS = (
    "zero_bytes",
    "streams",
    "out_of_memory",
    "two_devices",
    "growing_gives_back",
    "managed_beyond_plain",
)
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cupy_gpu")]


@pytest.mark.parametrize("check", CHECKS)
def test_check_holds_with_cupy(check: str) -> None:
    answer, error = runs.run_script("cupy_checks.py", check)
    assert error == ""
    if answer.startswith("skipped"):
        pytest.skip(answer)
    assert answer == "holds"


def test_training_is_identical_to_the_bit() -> None:
    done = race("cupy", marks=True, steps=6, turns=6, show=lambda _: None)
    assert done.repeatable
    assert done.identical

"""Examples of property tests are the same in each run, unless a seed is given."""

import hypothesis
import pytest


def test_the_gate_draws_the_same_examples_each_time(pytestconfig: pytest.Config) -> None:
    asked = pytestconfig.getoption("--hypothesis-seed") is not None
    full = "full" in pytestconfig.option.markexpr.replace("not full", "")
    assert hypothesis.settings.default.derandomize is not (asked or full)
    assert hypothesis.settings.default.database is None

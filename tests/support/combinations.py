"""Combinations of parameters: a normal run tests some of them, and ``-m full`` the others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest


def combinations(*values: Sequence[object], every: int) -> list[object]:
    """Return all combinations; all but each `every`-th have the mark "full".

    No length may divide `every`, so that each value is tried.
    """
    return [
        pytest.param(*combination, marks=[] if number % every == 0 else [pytest.mark.full])
        for number, combination in enumerate(itertools.product(*values))
    ]

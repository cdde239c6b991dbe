"""What must hold on a GPU under CuPy: see cupy_checks.py."""

from __future__ import annotations

import json

import compare_cupy
import pytest
import runs

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cupy_gpu")]


@pytest.mark.parametrize("check", compare_cupy.CHECKS)
def test_check_holds_with_cupy(check: str) -> None:
    answer, error = runs.told("cupy_checks.py", check)
    assert error == ""
    if answer.startswith("skipped"):
        pytest.skip(answer)
    assert answer == "holds"


@pytest.mark.parametrize("name", compare_cupy.NAMES)
def test_results_are_equal_to_the_bit_with_every_allocator(name: str) -> None:
    rows = {}
    for way in ("cupy", "mempool", "mempool growing", "mempool managed"):
        line, error = runs.told("cupy_worker.py", way, name)
        assert error == "", way
        rows[way] = json.loads(line)["result"]
    assert set(rows.values()) == {rows["cupy"]}, rows

"""Saved plans in another program, with another model or other batches: they cost next to no memory."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import programs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import run, simulated

from mempool import Pool

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KIB = 1 << 10
#: Seeds of a program's sizes.
SEED = st.integers(0, 1 << 16)


def sizes_of(seed: int, count: int) -> list[int]:
    """Return different sizes in KiB, in random order."""
    return random.Random(seed).sample(range(4, 1200), count)


def network(memory: programs.Watched, parameters: list[int], sizes: list[int]) -> Callable[[int], None]:
    """Return the iteration of a program: parameters in the first, then buffers, freed in reverse."""

    def iteration(number: int) -> None:
        if number == 0:
            for size in parameters:
                memory.allocate(size * KIB)
        kept = [memory.allocate(size * KIB) for size in sizes]
        for address in reversed(kept):
            memory.free(address)

    return iteration


def most_held(parameters: list[int], sizes: list[int], *, page: int, plan: Path | None = None) -> int:
    """Return the most bytes held while a program trains for six iterations."""
    with Pool(simulated(page=page), background=False, plan=plan) as pool:
        run(pool, network(programs.Watched(pool), parameters, sizes), 6, marks=True)
        return int(pool.core.stats()["reserved"]["peak"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@settings(deadline=None, max_examples=20)
@given(model=SEED, planned=SEED, other=SEED, scale=st.integers(2, 5), page=st.sampled_from([0, 4096]))
def test_plan_of_another_program_holds_no_more_memory_than_no_plan(
    folder: Path, model: int, planned: int, other: int, scale: int, page: int
) -> None:
    """The parameters are the same, as of one model; the activations are of other batches or other layers."""
    path, parameters, sizes = folder / "other.plan", sizes_of(model, 12), sizes_of(planned, 50)
    with Pool(simulated(page=page), background=False) as pool:
        run(pool, network(programs.Watched(pool), parameters, sizes), 12, marks=True)
        pool.save(path)
    for foreign in (sizes_of(other, 60), [size * scale for size in sizes]):
        if foreign[:6] == sizes[:6]:
            continue  # the plan is followed for some allocations
        without = most_held(parameters, foreign, page=page)
        assert most_held(parameters, foreign, page=page, plan=path) <= 1.01 * without

"""Runs of native harnesses for a given time, or without one guard each, and the guards by name."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Sequence

    import pytest

    Run = subprocess.CompletedProcess[str]


def seeds_until_time_is_up(run: Callable[[int], Run], seconds: float) -> None:
    """Run one seed after another for the given time; assert that none fails."""
    seed = time.time_ns()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done = run(seed)
        assert done.returncode == 0, f"seed {seed}: {done.stderr[-3000:]}"
        seed += 1


def assert_guards_needed(
    guards: Sequence[str], runs_without: Callable[[str | None], list[Run]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that some run fails without each guard, and none with all guards.

    Print the number of failures.
    """
    survived: list[str | None] = []
    rows = []
    for guard in [None, *guards]:
        runs = runs_without(guard)
        failed = [run for run in runs if run.returncode != 0]
        reason = failed[0].stderr.strip().splitlines()[-1:] if failed else []
        said = "".join(reason) or (f"signal {-failed[0].returncode}" if failed else "")
        rows.append(f"{guard or '(none)':14} {len(failed)}/{len(runs)}  {said}")
        if bool(failed) != (guard is not None):
            survived.append(guard)
    with capsys.disabled():
        print("\nguard          failed  by", *rows, sep="\n")
    assert survived == []


#: tests/native/stress.cpp, on the machine's own threads.
STRESS = [
    "planned_slots",
    "unplanned_ranges",
    "hole",
    "arena_end",
    "own_size",
    "lock",
    "fork",
]
_ALWAYS = [
    *("planned_slots", "unplanned_ranges", "hole", "arena_end", "own_size", "stream", "wait", "fork"),
    *("hold", "record_stream", "graph", "replays", "resize_shared", "vain_wait"),
    *(
        "arena_stream",
        "first_clock",
        "early_event",
        "undistinguished",
        "failed_wait",
        "stream_index",
        "prefetch_end",
    ),
]
#: tests/native/world.cpp, by guard: in which modes. Whole calls never meet, so they miss no lock; only where
#: threads take turns do programs wait for a use by another stream after the free.
WORLD: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_ALWAYS, ("whole", "inside")),
    "lock": ("inside",),
    "late_order": ("whole",),
    "renamed": ("inside",),
}

"""A planned pattern as a file: the plan, the sequence of each buffer, and how the program gets there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mempool.apart import apart
from mempool.planned import Planned
from traces.columns import LARGEST, MOST_THREADS
from traces.errors import TraceError
from traces.pattern import Pattern, WarmUp

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from traces.buffers import Buffers

T = TypeVar("T")


def write_planned(planned: Planned, path: str | Path, *, client: str = "", made_with: str = "") -> None:
    """Write a plan file; ``client`` says whose it is: "numpy", "torch"."""
    from solvers import write_plan

    warm_up = planned.pattern.warm_up
    extra = {
        "client": client,
        "made_with": made_with or planned.made_with,
        "iterations": str(planned.pattern.iterations),
        "coverage": repr(planned.pattern.coverage),
        "warm_up": ""
        if warm_up is None
        else json.dumps({name: column.tolist() for name, column in vars(warm_up).items()}),
    }
    columns = {"sequence": planned.pattern.sequence}
    write_plan(planned.plan, planned.buffers, path, extra=extra, extra_columns=columns)


def read_planned(path: str | Path) -> Planned:
    """Read a plan file, and check the plan before it is used.

    Raises:
        solvers.PlanError: the file is no plan of an iteration, or its plan is wrong.
        traces.TraceError: the file is damaged.
    """
    from solvers import PlanError, check, read_plan
    from solvers.store import read_plan_columns

    plan, buffers, extra = read_plan(path)
    columns = read_plan_columns(path)
    try:
        check(plan, buffers)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    if not len(buffers):
        raise PlanError(f"{path}: a plan of nothing")
    if plan.arenas:
        raise PlanError(f"{path}: a plan for {len(plan.arenas)} arenas, and a pool has one")
    if buffers.period is None or "sequence" not in columns or plan.offset is None:
        raise PlanError(
            f"{path}: not a plan of one iteration, which is what a pool replays: the trace that it was made "
            "from repeats none, or was planned as one (--whole)"
        )
    if bool((buffers.size[~buffers.persistent] <= 0).any()):
        raise PlanError(f"{path}: a buffer without a size")
    if len(buffers.gap_buffer) or bool(((plan.offset < 0) & ~buffers.persistent[:, None]).any()):
        raise PlanError(f"{path}: a pool replays no gaps, and no buffers without an offset")
    try:
        pattern = Pattern(
            buffers=buffers,
            sequence=_numbers(columns["sequence"], "sequence", len(buffers), 0, MOST_THREADS).astype(
                np.int32
            ),
            since={},
            iterations_seen=0,
            iterations=int(extra.get("iterations", "2")),
            begins=np.empty(0, np.int64),
            event=np.empty(0, np.int64),
            unresolved=0,
            coverage=float(extra.get("coverage", "1")),
            warm_up=_warm_up(extra.get("warm_up", ""), buffers),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(f"damaged plan: {type(error).__name__}: {error}", file=str(path)) from None
    return Planned(pattern, buffers, plan, extra.get("made_with", ""))


def read_planned_apart(path: str) -> Planned:
    """As `read_planned`, for a program that has no other use for Arrow."""
    return _apart(path, read_planned, path)


def write_planned_apart(planned: Planned, path: str, *, client: str, made_with: str) -> None:
    """As `write_planned`, for a program that has no other use for Arrow."""
    _apart(path, write_planned, planned, path, client=client, made_with=made_with)


def _apart(path: str, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    if path.startswith(("/dev/", "/proc/")):  # such names are of other files in another process
        return call(*arguments, **options)
    return apart("pyarrow", call, *arguments, **options)


def _numbers(values: Any, name: str, count: int | None, least: int, most: int) -> NDArray[np.int64]:
    """A column of whole numbers within bounds, and of so many."""
    found = np.asarray(values)
    if found.ndim != 1 or (count is not None and len(found) != count):
        raise ValueError(f"{name} is not a column of {'numbers' if count is None else count}")
    if len(found) == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(found.dtype, np.integer):
        raise ValueError(f"{name} holds something else than whole numbers")
    if int(found.min()) < least or int(found.max()) > most:
        raise ValueError(f"{name} is out of range")
    return found.astype(np.int64)


def _warm_up(text: str, buffers: Buffers) -> WarmUp | None:
    if not text:
        return None
    table: dict[str, Any] = json.loads(text)
    size = _numbers(table["size"], "the warm-up's size", None, 1, LARGEST)
    count = len(size)
    position = _numbers(table["position"], "the warm-up's position", count, -1, len(buffers) - 1)
    sequence = _numbers(table["sequence"], "the warm-up's sequence", count, 0, MOST_THREADS)
    marks = _numbers(table["marks"], "the warm-up's marks", None, 0, count)
    return WarmUp(sequence.astype(np.int32), size, position, marks)

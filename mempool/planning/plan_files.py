"""Plan files: plans, the allocation sequence of each buffer, and the warm-up of the program.

A pool may have several plans. The file is a valid plan file of the latest plan, so every tool accepts it; the
other plans are embedded as files, and jointly planned variants with their reach into each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from mempool.planning.options import OPTIONS
from mempool.planning.planned_pattern import PlannedPattern
from mempool.planning.registry import MOST_KNOWN
from traces.columns import LARGEST, MOST_THREADS
from traces.errors import TraceError
from traces.iterations.pattern import Pattern, WarmUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from solvers.packing.variants import IterationVariant
    from traces.buffers import Buffers

T = TypeVar("T")
#: Prefix of the columns that are embedded files of other plans.
OTHER = "other."

#: Program of the subprocess; stdout is redirected to stderr, so that prints do not corrupt the answer.
_CODE = """
import os, pickle, sys
answer = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path[:] = pickle.load(sys.stdin.buffer)
call, arguments, options = pickle.load(sys.stdin.buffer)
try:
    said = True, call(*arguments, **options)
except Exception as error:
    said = False, error
pickle.dump(said, answer)
"""


@dataclass(frozen=True)
class SavedPlans:
    """Plans of a pool, ready to be saved.

    Attributes:
        plans: plans, the latest first.
        variants: variants that were planned jointly, by their index in ``plans``, in the order of the columns
            of `solvers.packing.variants.IterationVariant.reach`.
        client: import name of the framework that the plans are for; empty if unknown.
        detected_marks: true if iterations end at detected steps of an optimizer, not at marks of the program.
        remembered: true if the pool, not the user, chose the plans.
    """

    plans: Sequence[PlannedPattern]
    variants: Mapping[int, IterationVariant] = field(default_factory=dict)
    client: str = ""
    detected_marks: bool = False
    remembered: bool = False

    def in_warm_up_order(self) -> list[PlannedPattern]:
        """Return the plans in the order of their use, the plan for the program's first iteration first.

        The first plan is an envelope, whose iterations may have any size, else the plan with the shortest
        warm-up.
        """

        def since(planned: PlannedPattern) -> float:
            warm_up = planned.pattern.warm_up
            return math.inf if warm_up is None else len(warm_up.size)

        plans = sorted(self.plans, key=since)
        envelope = next((stored for stored in plans if stored.pattern.least is not None), None)
        led_into = next((stored for stored in plans if stored.native_warm_up() is not None), self.plans[0])
        first = envelope or led_into
        others = [stored for stored in plans if stored is not first]
        return [first.with_brief_warm_up() if others else first, *others]


def write_plans(saved: SavedPlans, path: str | Path, *, made_with: str = "") -> None:
    """Write all plans of a pool."""
    extra = {
        "client": saved.client,
        "made_with": made_with or saved.plans[0].made_with,
        "detected_marks": "1" if saved.detected_marks else "",
    }
    others = {}
    for number in range(1, len(saved.plans)):
        file = BytesIO()
        _write_stored(saved, number, file, extra, {})
        others[f"{OTHER}{number}"] = np.frombuffer(file.getbuffer(), np.uint8)
    _write_stored(saved, 0, path, extra, others)


def _write_stored(
    saved: SavedPlans,
    number: int,
    path: str | Path | BinaryIO,
    extra: Mapping[str, str],
    columns: dict[str, NDArray[Any]],
) -> None:
    from solvers import write_plan

    planned, variant = saved.plans[number], saved.variants.get(number)
    pattern, warm_up = planned.pattern, planned.pattern.warm_up
    columns = {"sequence": pattern.sequence, **columns}
    if pattern.least is not None:
        columns["least"] = pattern.least
    extra = {
        **extra,
        "iterations": str(pattern.iterations),
        "coverage": repr(pattern.coverage),
        "warm_up": ""
        if warm_up is None
        else json.dumps({name: column.tolist() for name, column in vars(warm_up).items()}),
    }
    if variant is not None:
        extra["kind"] = str(list(saved.variants).index(number))
        columns |= {"kind.end": variant.buffers.end, "kind.reach": variant.reach.ravel()}
    write_plan(planned.plan, planned.buffers, path, extra=extra, extra_columns=columns)


def read_plans(path: str | Path) -> SavedPlans:
    """Read all plans of a file, and check the plans before use.

    Raises:
        solvers.PlanError: the file is no plan of an iteration, or a plan is wrong.
        traces.TraceError: the file is damaged.
    """
    from solvers import PlanError

    stored = _read_stored(path, path)
    columns, stored_plans = stored.columns, [stored]
    count = sum(name.startswith(OTHER) for name in columns)
    if count >= MOST_KNOWN:
        raise PlanError(f"{path}: {count + 1} plans are more than {MOST_KNOWN}")
    for number in range(1, count + 1):
        column = columns.get(f"{OTHER}{number}")
        if column is None or column.dtype != np.uint8:
            raise TraceError(f"damaged plan: its other plans are not 1 to {count}", file=str(path))
        stored_plans.append(_read_stored(BytesIO(column.tobytes()), path))
    if len({stored.planned.key for stored in stored_plans}) != len(stored_plans):
        raise PlanError(f"{path}: two plans of the same sequence")
    with _errors_of_file(path):
        variants = _variants(stored_plans)
    plans = [stored.planned for stored in stored_plans]
    extra = stored.extra
    return SavedPlans(plans, variants, extra.get("client", ""), extra.get("detected_marks", "") == "1")


class _StoredPlan(NamedTuple):
    planned: PlannedPattern
    extra: dict[str, str]
    columns: dict[str, NDArray[Any]]


def _read_stored(file: str | Path | BinaryIO, path: str | Path) -> _StoredPlan:
    """Read one plan with all columns; errors name ``path``."""
    from solvers import PlanError, check, read_plan, read_plan_columns

    try:
        plan, buffers, extra = read_plan(file)
        columns = read_plan_columns(file)
    except TraceError as error:
        raise error.within(path) from None
    with _errors_of_file(path):
        check(plan, buffers)
    if not len(buffers):
        raise PlanError(f"{path}: a plan of nothing")
    if buffers.period is None or "sequence" not in columns or plan.offset is None:
        raise PlanError(
            f"{path}: not a plan of one iteration, which is what a pool replays: the trace that it was made "
            "from repeats none, or was planned as one (--whole)"
        )
    if bool((buffers.size[~buffers.persistent] <= 0).any()):
        raise PlanError(f"{path}: a buffer without a size")
    if len(buffers.gap_buffer) or bool(((plan.offset < 0) & ~buffers.persistent[:, None]).any()):
        raise PlanError(f"{path}: a pool replays no gaps, and no buffers without an offset")
    with _errors_of_file(path):
        sequence = _numbers(columns["sequence"], "sequence", len(buffers), 0, MOST_THREADS)
        pattern = Pattern(
            buffers=buffers,
            sequence=sequence.astype(np.int32),
            since={},
            iterations_seen=0,
            iterations=int(extra.get("iterations", "2")),
            begins=np.empty(0, np.int64),
            event=np.empty(0, np.int64),
            unresolved=0,
            coverage=float(extra.get("coverage", "1")),
            warm_up=_warm_up(extra.get("warm_up", ""), buffers),
            least=_least(columns["least"], buffers) if "least" in columns else None,
        )
    return _StoredPlan(PlannedPattern(pattern, buffers, plan, extra.get("made_with", "")), extra, columns)


@contextlib.contextmanager
def _errors_of_file(path: str | Path) -> Iterator[None]:
    """Convert errors inside the context into errors about the file."""
    from solvers import PlanError

    try:
        yield
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise TraceError(f"damaged plan: {type(error).__name__}: {error}", file=str(path)) from None


def _variants(stored_plans: Sequence[_StoredPlan]) -> dict[int, IterationVariant]:
    """Return the jointly planned variants, after checking that their plans are valid in any succession."""
    from mempool.planning.variants import pieces
    from solvers import PlanError
    from solvers.packing.check import check_variants
    from solvers.packing.variants import MOST_COLUMNS, IterationVariant

    places = {
        number: int(stored.extra["kind"])
        for number, stored in enumerate(stored_plans)
        if "kind" in stored.extra
    }
    if not places:
        return {}
    numbers = sorted(places, key=places.__getitem__)
    if [places[number] for number in numbers] != list(range(len(numbers))) or len(numbers) == 1:
        raise ValueError("variants are missing")
    joint = [stored_plans[number].planned for number in numbers]
    most = max(planned.plan.columns for planned in joint)
    if pieces(joint) > OPTIONS.max_joint_pieces or most > MOST_COLUMNS:  # a longer check takes long
        size = sum(len(planned.buffers) for planned in joint)
        problem = f"{len(joint)} variants of {size} buffers in up to {most} columns"
        raise PlanError(f"{problem} are more than are planned together")
    variants = {}
    for number in numbers:
        planned, columns = stored_plans[number].planned, stored_plans[number].columns
        rows, count = planned.buffers, len(numbers)
        end = _numbers(columns["kind.end"], "a kind's end", len(rows), 0, LARGEST)
        reach = _numbers(columns["kind.reach"], "a kind's reach", len(rows) * count, 0, LARGEST)
        buffers = dataclasses.replace(rows, end=end)
        sequence = planned.pattern.sequence.astype(np.int64)
        variants[number] = IterationVariant(
            buffers, reach.reshape(-1, count), sequence, planned.pattern.least
        )
    check_variants(list(variants.values()), [planned.plan for planned in joint])
    return variants


def read_plans_in_subprocess(path: str) -> SavedPlans:
    """Read as `read_plans`, in a subprocess unless Arrow is loaded already."""
    return call_in_subprocess(_needs(path), read_plans, path)


def write_plans_in_subprocess(saved: SavedPlans, path: str, *, made_with: str) -> None:
    """Write as `write_plans`, in a subprocess unless Arrow is loaded already."""
    call_in_subprocess(_needs(path), write_plans, saved, path, made_with=made_with)


def _needs(path: str) -> str:
    """Return the module for `call_in_subprocess`; a loaded one if the name depends on the process."""
    return "sys" if path.startswith(("/dev/", "/proc/")) else "pyarrow"


def _numbers(values: Any, name: str, count: int | None, least: int, most: int) -> NDArray[np.int64]:
    """Return a column of integers, after checking their number and bounds."""
    column = np.asarray(values)
    if column.ndim != 1 or (count is not None and len(column) != count):
        raise ValueError(f"{name} is not a column of {'numbers' if count is None else count}")
    if len(column) == 0:
        return np.zeros(0, np.int64)
    if not np.issubdtype(column.dtype, np.integer):
        raise ValueError(f"{name} holds something else than whole numbers")
    if int(column.min()) < least or int(column.max()) > most:
        raise ValueError(f"{name} is out of range")
    return column.astype(np.int64)


def _least(column: Any, buffers: Buffers) -> NDArray[np.int64]:
    least = _numbers(column, "the least size", len(buffers), 1, LARGEST)
    if bool((least > buffers.size).any()):
        raise ValueError("a least size is larger than the largest")
    return least


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


def call_in_subprocess(needs: str, call: Callable[..., T], *arguments: object, **options: object) -> T:
    """Call a function, in a subprocess if the module ``needs`` is not loaded here.

    Function, arguments and result are pickled; external data is never unpickled. If no subprocess can be
    started, the function is called here.

    Raises:
        Exception: the error that the function raises.
    """
    answer = None
    if needs not in sys.modules and sys.executable:
        with contextlib.suppress(Exception):  # sandbox, embedded Python, no memory: call here instead
            done = subprocess.run(  # noqa: S603
                [sys.executable, "-I", "-c", _CODE],  # no PYTHONPATH, which `mempool run` may have changed
                input=pickle.dumps(sys.path) + pickle.dumps((call, arguments, options)),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
            )
            answer = pickle.loads(done.stdout)  # noqa: S301 - of our own code
    if answer is None:
        return call(*arguments, **options)
    succeeded, result = answer
    if not succeeded:
        raise result
    value: T = result
    return value

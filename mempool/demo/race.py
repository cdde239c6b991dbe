"""Training under two allocators, in separate alternating processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

    from solvers import Plan
    from traces import Buffers

#: Steps of a turn, number of turns, and number of untimed first turns, in which the pool records and plans.
STEPS, TURNS, WARM_UP = 10, 14, 4
#: -P: ignore the current folder, which may be a source tree without native modules.
WORKER = ("-P", "-m", "mempool.demo.worker")
_ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "BLIS_NUM_THREADS"), "1"
)


class WorkerError(RuntimeError):
    """Error of a demonstration process that ended too early; the message is the last line on stderr."""


@dataclass
class Side:
    """The results of one process.

    Attributes:
        losses: loss of every step, as hexadecimal floats.
        seconds: duration of every timed step.
        page_faults: number of page faults of every timed step.
        end: the last answer.
    """

    losses: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    page_faults: list[int] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def same_results(self, other: Side) -> bool:
        """Return true if all losses and the final parameters are bit-identical."""
        return self.losses == other.losses and self.end["parameters"] == other.end["parameters"]


@dataclass(frozen=True)
class Race:
    """The outcome: two runs of the default allocator, one of the pool, and the pool's plan."""

    default: Side
    again: Side
    pool: Side
    plan: Plan | None
    buffers: Buffers | None

    @property
    def repeatable(self) -> bool:
        """Return true if both runs of the default allocator agree; otherwise `identical` is meaningless."""
        return self.default.same_results(self.again)

    @property
    def identical(self) -> bool:
        """Return true if the pool's results are bit-identical to the default allocator's."""
        return self.repeatable and self.default.same_results(self.pool)

    def answer(self) -> dict[str, Any]:
        """Return the keys of ``mempool demo --json``."""
        report = self.pool.end["report"]
        keys = (
            "hits",
            "misses",
            "hit_rate",
            "coverage",
            "plan_active_at_iteration",
            "peak_load_bytes",
            "lower_bound_bytes",
            "planned_arena_bytes",
            "arena_bytes",
            "fragmentation",
            "persistent_bytes",
            "reserved_bytes",
            "reserved_peak_bytes",
        )
        seconds = {name: median(side.seconds) for name, side in self._sides().items()}
        return {
            "identical": self.identical,
            "default_repeatable": self.repeatable,
            "iterations": len(self.pool.losses),
            "loss_first": float.fromhex(self.pool.losses[0]),
            "loss_last": float.fromhex(self.pool.losses[-1]),
            "state": report["state"],
            **{key: report[key] for key in keys},
            "resident_bytes": {name: side.end["resident_bytes"] for name, side in self._sides().items()},
            "gpu_bytes": {name: side.end["gpu_bytes"] for name, side in self._sides().items()},
            "page_faults_per_iteration": {
                name: median(side.page_faults) for name, side in self._sides().items()
            },
            "seconds_per_iteration": seconds,
            "speedup": seconds["default"] / seconds["pool"],
        }

    def _sides(self) -> dict[str, Side]:
        return {"default": self.default, "pool": self.pool}


def race(framework: str, *, marks: bool, steps: int, turns: int, show: Callable[[str], None]) -> Race:
    """Train in three alternating processes: two with the default allocator, one with the pool.

    Args:
        framework: a key of `mempool.demo.worker.FRAMEWORKS`.
        marks: mark the iterations for the pool, instead of letting the pool detect them.
        steps: iterations of a turn.
        turns: number of turns of each process, more than `WARM_UP`.
        show: called with the progress.

    Raises:
        WorkerError: a process failed.
    """
    from solvers import read_plan

    pool = "pool" if marks else "unmarked"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan")
        sides = [Side(), Side(), Side()]
        commands = [("default",), ("default",), (pool, str(path))]
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(Process([*WORKER, framework, *command])) for command in commands]
            for turn in range(turns):
                show(f"training, {turn * steps} of {turns * steps} iterations")
                for side, process in zip(sides, processes, strict=True):
                    _turn(side, process, steps, timed=turn >= WARM_UP)
            for side, process in zip(sides, processes, strict=True):
                side.end = process.ask("end")
        plan, buffers = read_plan(path)[:2] if path.exists() else (None, None)
    return Race(sides[0], sides[1], sides[2], plan, buffers)


def _turn(side: Side, process: Process, steps: int, *, timed: bool) -> None:
    answer = process.ask(f"{'timed' if timed else 'steps'} {steps}")
    side.losses += answer["losses"]
    if timed:
        side.seconds += answer["seconds"]
        side.page_faults += answer["page_faults"]


class Process:
    """Worker process with one thread for linear algebra; answers each line in JSON."""

    def __init__(self, arguments: Sequence[str], **variables: str) -> None:
        """Start the process.

        Args:
            arguments: arguments of Python.
            variables: extra environment variables; the others come from this process, without mempool's
                settings.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMPOOL")}
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment | _ONE_THREAD | variables,
        )

    def __enter__(self) -> Self:
        return self

    def ask(self, line: str) -> Any:
        """Send a line and wait for the answer.

        Raises:
            WorkerError: the process gave no answer.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().decode(errors="replace").split("\n")
            raise WorkerError(next((text for text in reversed(said) if text.strip()), "ended without a word"))
        return json.loads(answer)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # a line was left unread
                    pipe.close()
        self._process.wait()
        self._errors.close()

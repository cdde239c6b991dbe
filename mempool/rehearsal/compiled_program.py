"""Calls of ``torch.compile`` by a rehearsed program: notes on them, and the cost of compiling in a limit."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

from mempool.rehearsal import compilation
from mempool.rehearsal.program_lines import is_run_by_program

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.rehearsal.job import Job, Outcome


class CompiledProgram:
    """The graphs of a program.

    Attributes:
        eager: some graphs run operation by operation.
    """

    def __init__(self, job: Job, outcome: Outcome, torch: Any) -> None:
        self._job, self._outcome, self._torch = job, outcome, torch
        self.eager = False

    def note_calls(self, keep_step_hook: Callable[[], object]) -> None:
        """Note a program that compiles; without Triton its graphs run operation by operation.

        Args:
            keep_step_hook: called before each compilation, so that an optimizer's compiled steps are counted.
        """
        compile_, missing = self._torch.compile, compilation.missing_requirement()

        @functools.wraps(compile_)
        def noted(*args: Any, **options: Any) -> Any:
            own = is_run_by_program(sys._getframe(1))
            self._outcome.compiles |= own
            keep_step_hook()
            if missing is not None and options.get("backend", "inductor") == "inductor":
                if own and not self.eager:
                    self.note_eager(f"torch.compile had no effect: pip install --no-deps {missing}")
                options["disable"] = True
            return compile_(*args, **options)

        self._torch.compile = noted

    def note_eager(self, sentence: str) -> None:
        """Note that graphs run operation by operation."""
        self.eager = True
        self._outcome.notes.append(f"{sentence}; compiled, the program may hold less memory")

    def compile_within_limit(self) -> None:
        """Let the program compile with this project's backend within the limit, and libraries not at all."""
        compile_ = self._torch.compile
        options = {"limit": self._job.offload_limit, "inner": "eager"}

        def within(model: Any = None, *, dynamic: Any = None, fullgraph: bool = False, **_: Any) -> Any:
            if model is None:
                return functools.partial(within, dynamic=dynamic, fullgraph=fullgraph)
            if not is_run_by_program(sys._getframe(1)):
                return model
            return compile_(model, backend="mempool", options=options, dynamic=dynamic, fullgraph=fullgraph)

        self._torch.compile = within

    def limit_cost(self) -> dict[str, Any] | None:
        """Return the cost of the limit, by the decisions about the graphs."""
        from mempool.torch.compiled import report

        graphs = report().graphs
        if not graphs:
            return None

        def total(*names: str) -> Any:
            return sum(graph[name] for graph in graphs for name in names)

        step = float(total("plain_seconds"))
        return {
            "limit_bytes": max(graph["limit_bytes"] for graph in graphs),
            "planned": True,
            "step_seconds": step,
            "added_seconds": float(total("predicted_seconds")) - step,
            "host_bytes": total("predicted_host_bytes"),
            "moved_bytes": total("offloaded_bytes", "reloaded_bytes"),
            "smallest_limit_bytes": max(graph["least_limit_bytes"] or 0 for graph in graphs),
        }

    def note_refusal(self, error: BaseException) -> bool:
        """Note a limit that is infeasible; return false for another error."""
        least = getattr(error, "least_bytes", None)
        if not self._job.compiled or least is None:
            return False
        from mempool.torch.compiled.shared_limit import SHARED_LIMITS

        limit = self._job.offload_limit
        self._outcome.offloading = {
            "limit_bytes": limit if isinstance(limit, int) else SHARED_LIMITS[-1].relative_bytes,
            "planned": False,
            **dict.fromkeys(("step_seconds", "added_seconds", "host_bytes", "moved_bytes")),
            "smallest_limit_bytes": least,
        }
        return True

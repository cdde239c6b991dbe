"""The graphs of one call of `torch.compile`, which share its limit."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch._dynamo import config
from torch._guards import CompileContext

from solvers.rewriting.rules import matching

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from mempool.torch.rewriting.clock import Clock
    from mempool.torch.rewriting.decide import Decided
    from mempool.torch.rewriting.options import Options


@dataclass(frozen=True, eq=False)
class Part:
    """One graph.

    Attributes:
        frame: the number that Dynamo gives to the frame it is of; parts of one function have growing ones.
        more: whether the graph breaks off, so that the function goes on in another.
        options: what was asked for.
        decided: what became of it.
        clock: how long its two graphs take.
        host_end: bytes from the begin of the host's arena to the end of where its copies are planned to lie.
    """

    frame: int
    more: bool
    options: Options
    decided: Decided
    clock: Clock
    host_end: int = 0

    @property
    def kept_bytes(self) -> int:
        """What it has on the device between its forward and its backward pass.

        Its results do not count: the next graph is given them.
        """
        made, graph = self.decided, self.decided.rewritten
        if not graph.backward.any():
            return 0
        captured = made.captured
        results = {int(graph.base[v]) for v in captured.outputs[: captured.forward_outputs] if v >= 0}
        given = sum(int(graph.size[v]) for v in results if graph.producer[v] >= 0)
        if made.needed is None:
            load = int(made.timed.load[np.argmax(graph.backward)])
        else:
            load = made.needed.kept_bytes
        return max(load - made.outside_bytes - given, 0)


@dataclass(eq=False)
class Budget:
    """What one call of `torch.compile` has compiled.

    Attributes:
        asked: the options as they were given, which tell calls from each other.
        parts: the graphs, of each frame the last one.
        met: patterns of which something was met.
    """

    asked: Any
    parts: dict[int, Part] = field(default_factory=dict)
    met: set[str] = field(default_factory=set)

    def kept_before(self, frame: int) -> int:
        """Bytes that the graphs of frames before this one keep while it runs, if all of them ran."""
        return sum(part.kept_bytes for number, part in self.parts.items() if number < frame)

    def host_before(self, frame: int) -> int:
        """Where in the host's arena copies of a frame's graph begin: behind those of frames before it."""
        return max((part.host_end for number, part in self.parts.items() if number < frame), default=0)

    def add(self, part: Part) -> None:
        """One more graph; when it is a function's last, patterns that name nothing at all are told once."""
        self.parts[part.frame] = part
        graph, options = part.decided.captured.graph, part.options
        patterns = {*options.include, *options.exclude} - self.met
        self.met |= {one for one in patterns if matching(graph, [one]).any()}
        if not part.more and (strange := sorted(patterns - self.met)):
            self.met |= patterns
            names = [*graph.kinds[:3], *[one for one in graph.modules if one][:3]]
            warnings.warn(
                f"no operation or module is named {', '.join(map(repr, strange))} by include or exclude; "
                f"there are such as {', '.join(map(repr, names))}",
                stacklevel=2,
            )


#: The last ones, in the order in which they were first met.
BUDGETS: list[Budget] = []
_MOST = 64


def budget_of(options: Mapping[str, Any] | None) -> Budget:
    """The budget of a call, which passes the same options each time."""
    for budget in BUDGETS:
        if budget.asked is options:
            return budget
    BUDGETS.append(Budget(options))
    del BUDGETS[:-_MOST]
    return BUDGETS[-1]


def frame_of(graph: fx.GraphModule) -> tuple[int, bool]:
    """The frame that is being compiled, and whether it goes on after this graph."""
    number = getattr(CompileContext.current_compile_id(), "frame_id", None)
    reason = getattr(graph, "compile_subgraph_reason", None)
    return number or 0, bool(getattr(reason, "graph_break", False))


def warn_of_the_last() -> None:
    """Say that PyTorch compiles the function no more: what it then runs has no limit."""
    number = getattr(CompileContext.current_compile_id(), "frame_compile_id", None)
    if number is not None and number + 1 == config.recompile_limit:
        warnings.warn(
            f"compiled {config.recompile_limit} times, as often as PyTorch allows: other or "
            "larger sizes than so far will run uncompiled, without any limit; meet the largest sizes first, "
            "or raise torch._dynamo.config.recompile_limit",
            stacklevel=2,
        )

"""What to do with the values of a step, by the options."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mempool.torch.rewriting.calls import calls_of
from mempool.torch.rewriting.capture import capture
from mempool.torch.rewriting.costs import Measured, number
from mempool.torch.rewriting.runtime import RUNTIME
from mempool.torch.swapping.host_memory import default_host_limit
from solvers.errors import PlanError
from solvers.rewriting import Rewriting, rewrite
from solvers.rewriting.calls import Calls
from solvers.rewriting.choose import Chooser
from solvers.rewriting.levels import levels_of
from solvers.rewriting.passes import by_pass
from solvers.rewriting.rules import Rules, matching, published
from solvers.rewriting.timed import Timed, simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.torch.rewriting.capture import Captured
    from mempool.torch.rewriting.joined import Joined
    from mempool.torch.rewriting.options import Options
    from solvers.rewriting import Graph
    from solvers.swap import Link

#: Bytes of tickets on the way, for each value that may leave.
_TICKETS = 16
#: Levels between readers that share a copy back, where no limit decides.
_NEIGHBOURS = 5


@dataclass(frozen=True, eq=False)
class Decided:
    """Decisions about a step, and what is predicted of it.

    Attributes:
        captured: the numbers that they speak of.
        rewriting: they.
        rewritten: the step with them in it.
        plain: the step without them, simulated.
        timed: the step with them.
        outside_bytes: what lies on the device beside it.
        own_bytes: copies of at most so many bytes the program makes itself.
    """

    captured: Captured
    rewriting: Rewriting
    rewritten: Graph
    plain: Timed
    timed: Timed
    outside_bytes: int
    own_bytes: int = 0


def decided(joined: Joined, options: Options, outside_bytes: int = 0, *, least: bool = False) -> Decided:
    """Which values leave, and which are made again.

    Operations are timed on the device, each kind of call once, and so are copies where no link is given.

    Args:
        joined: the graphs.
        options: of the backend.
        outside_bytes: what lies on the device beside what the graphs see.
        least: keep no more from the forward to the backward pass than must be.

    Raises:
        PlanError: the limit cannot be held.
    """
    device = device_of(joined.module)
    devices = [device] if device.type == "cuda" else []
    with _disable_current_modes(), torch.random.fork_rng(devices):
        captured = _measured(joined, Measured(device))
        link, calls = options.link, Calls()
        if link is None:
            calls = calls_of(device, options.host_limit)
            link = calls.beside(RUNTIME.engine(device, options.host_limit).link())
    graph = decidable(captured)
    if options.limit is None:
        rewriting = _beyond(graph, options)
    else:
        rewriting = _within(graph, options, (link, calls), outside_bytes, least=least)
    rewritten = calls.within(rewrite(graph, by_pass(graph, rewriting)))  # as the two graphs carry it out
    plain, timed = (simulate(one, link, outside_bytes=outside_bytes) for one in (graph, rewritten))
    return Decided(captured, rewriting, rewritten, plain, timed, outside_bytes, calls.own_bytes)


def _within(
    graph: Graph, options: Options, copies: tuple[Link, Calls], outside: int, *, least: bool
) -> Rewriting:
    limit = options.limit or 0

    def chooser(beside_backward: int) -> Chooser:
        """Decides as if so much more were there when the backward pass begins."""
        workspace = graph.workspace.copy()
        workspace[np.argmax(graph.backward)] += beside_backward
        return Chooser(
            graph.with_columns(workspace=workspace),
            copies[0],
            calls=copies[1],
            outside_bytes=outside + _TICKETS * int(graph.movable.sum()),
            host_limit=options.host_limit or default_host_limit(),
            movable=_chosen(graph, options),
        )

    if least and graph.backward.any() and (kept := chooser(limit).least()[0] - limit) < limit:
        with contextlib.suppress(PlanError):
            return chooser(limit - kept).decide(limit).rewriting
    return chooser(0).decide(limit).rewriting


def _measured(joined: Joined, clock: Measured) -> Captured:
    captured = capture(joined.module, joined.halves.outputs, seconds=clock)
    workspace = [clock.workspace(node) for node in captured.operations]
    return replace(captured, graph=captured.graph.with_columns(workspace=workspace))


def device_of(module: torch.fx.GraphModule) -> torch.device:
    """Where most of what a graph is given lies, by bytes."""
    found: dict[torch.device, int] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        held = node.meta.get("val")
        if isinstance(held, torch.Tensor):
            size = int(number(held.numel())) * held.element_size()
            found[held.device] = found.get(held.device, 0) + size
    return max(found, key=lambda one: (one.type != "cpu", found[one]), default=torch.device("cpu"))


def decidable(captured: Captured) -> Graph:
    """The graph in which only what we can send away may leave: of the forward pass, whole memories."""
    graph = captured.graph
    forward = ~graph.backward[graph.producer] & (graph.producer >= 0)
    whole = [node is not None and _is_whole(node.meta.get("val")) for node in captured.values]
    return graph.with_columns(movable=graph.movable & (forward & np.array(whole, bool))[graph.base])


def _is_whole(held: Any) -> bool:
    """Whether what a node makes is a tensor with all of its memory in the order of its elements."""
    if not isinstance(held, torch.Tensor) or held.layout != torch.strided or held.is_quantized:
        return False
    if held.is_conj() or held.is_neg():
        return False
    shape, strides = map(number, held.shape), map(number, held.stride())
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return bool(extent * held.element_size() >= number(held.untyped_storage().nbytes()) > 0)


def _chosen(graph: Graph, options: Options) -> NDArray[np.bool_]:
    """Values whose maker the patterns name: bool[M]."""
    made = matching(graph, options.include) if options.include else np.ones(len(graph), bool)
    made &= ~matching(graph, options.exclude)
    result: NDArray[np.bool_] = made[graph.producer]
    return result


def _beyond(graph: Graph, options: Options) -> Rewriting:
    """Every value at a distance, by the published rules; neighbours share a copy back."""
    rules = Rules(threshold=options.threshold or 0, ahead=1, groupby=_NEIGHBOURS)
    chosen = graph.with_columns(movable=graph.movable & _chosen(graph, options)[graph.base])
    return published(chosen, levels_of(graph), rules)

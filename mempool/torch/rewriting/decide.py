"""What to do with the values of a step, by the options."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mempool.torch.rewriting.calls import calls_of
from mempool.torch.rewriting.capture import capture
from mempool.torch.rewriting.costs import Measured, in_kernels, number
from mempool.torch.rewriting.decided import Decided
from mempool.torch.rewriting.runtime import RUNTIME
from mempool.torch.swapping.host_memory import default_host_limit
from solvers.errors import PlanError
from solvers.rewriting import Rewriting, rewrite
from solvers.rewriting.calls import Calls
from solvers.rewriting.choose import Chooser
from solvers.rewriting.levels import levels_of
from solvers.rewriting.passes import by_pass
from solvers.rewriting.pauses import between, paused, unpaused
from solvers.rewriting.rules import Rules, matching, published
from solvers.rewriting.timed import simulate

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import fx

    from mempool.torch.rewriting.capture import Captured
    from mempool.torch.rewriting.joined import Joined
    from mempool.torch.rewriting.options import Options
    from solvers.rewriting import Graph

#: Bytes of tickets on the way, for each value that may leave.
_TICKETS = 16
#: How often to look for the most bytes that a graph can leave to others, and for those with a small host.
_TRIES, _HALVINGS = 16, 4
#: Levels between readers that share a copy back, where no limit decides.
_NEIGHBOURS = 5


class Deciding:
    """About one step: what its operations and copies take is measured once, for any number of limits."""

    def __init__(
        self, joined: Joined, options: Options, outside_bytes: int = 0, *, least: bool = False
    ) -> None:
        """Measure: operations on the device, each kind of call once, and copies where no link is given.

        Args:
            joined: the graphs.
            options: of the backend.
            outside_bytes: what lies on the device beside what the graphs see.
            least: keep no more from the forward to the backward pass than must be.
        """
        self.options, self._outside_bytes, self.keeps_little = options, outside_bytes, least
        device = device_of(joined.module)
        devices = [device] if device.type == "cuda" else []
        self._clock = Measured(device)
        with _disable_current_modes(), torch.random.fork_rng(devices):
            self._captured = _measured(joined, self._clock, fused=options.inner != "eager")
            link, self._calls = options.link, Calls()
            if link is None:
                self._calls = calls_of(device, options.host_limit)
                link = self._calls.beside(RUNTIME.engine(device, options.host_limit).link())
        self._link = link
        self._graph = decidable(self._captured)
        self._choosers: dict[int, Chooser] = {}

    def workspace(self, node: fx.Node) -> int:
        """Bytes that an operation of the graphs has for itself while it runs."""
        return self._clock.workspace(node)

    def least(self) -> int:
        """The lowest limit that can be held."""
        return self._chooser(0).least()[0]

    def decide(self) -> Decided:
        """By the options.

        Raises:
            PlanError: the limit cannot be held.
        """
        limit = self.options.limit
        return self._decided(_beyond(self._graph, self.options)) if limit is None else self.within(limit)

    def within(self, limit: int) -> Decided:
        """By the options, but for another limit.

        Raises:
            PlanError: it cannot be held.
        """
        if not self.keeps_little or (room := self._room(limit)) <= 0:
            return self._with_room(0, limit)
        with contextlib.suppress(PlanError):
            return self._with_room(room, limit)
        found = self._with_room(0, limit)  # the host is too small
        fewest, most = limit - room, between(found.rewritten) + found.outside_bytes
        for _ in range(_HALVINGS):
            middle = (fewest + most) // 2
            try:
                found, most = self._with_room(limit - middle, limit), middle
            except PlanError:
                fewest = middle
        return found

    def kept_bytes(self, limit: int) -> int:
        """What is kept between the passes within a limit; within one that cannot be held, all that may be."""
        try:
            return self.within(limit).kept_bytes
        except PlanError:
            return self._all_bytes

    def unlimited(self) -> Decided:
        """As within a limit that is never met: nothing moves but what must, to keep little."""
        return self.within(2 * self._all_bytes)

    @cached_property
    def _all_bytes(self) -> int:
        """More than a step can need."""
        graph = self._graph
        tickets = _TICKETS * len(graph.size)
        return self._outside_bytes + int(graph.size.sum() + graph.workspace.max(initial=0)) + tickets

    def _room(self, limit: int) -> int:
        """The most bytes that can be left of a limit between the passes; 0 where it cannot be held."""
        if not self._graph.backward.any() or limit < self.least():
            return 0
        low, high = 0, limit - (self._chooser(self._all_bytes).least()[0] - self._all_bytes)
        room = high
        for _ in range(_TRIES):
            if room <= low:
                break
            over = self._chooser(room).least()[0] - limit
            if over <= 0:
                low = room - over  # a byte more of room needs at most a byte more
            else:
                high = room - over
            room = (low + high + 1) // 2 if low < high else low
        return low

    def _with_room(self, room: int, limit: int) -> Decided:
        """Within a limit, of which so much is left when the backward pass begins."""
        made = self._chooser(room).decide(limit).rewriting
        return self._decided(unpaused(self._graph, made) if room else made)

    def _chooser(self, room: int) -> Chooser:
        """Decides as if so much more were there between the passes."""
        if room not in self._choosers:
            graph, options = self._graph, self.options
            self._choosers[room] = Chooser(
                paused(graph, room) if room else graph,
                self._link,
                calls=self._calls,
                outside_bytes=self._outside_bytes + _TICKETS * int(graph.movable.sum()),
                host_limit=options.host_limit or default_host_limit(),
                movable=_chosen(graph, options),
            )
        return self._choosers[room]

    def _decided(self, rewriting: Rewriting) -> Decided:
        graph, outside = self._graph, self._outside_bytes
        # As the two graphs carry it out.
        rewritten = self._calls.within(rewrite(graph, by_pass(graph, rewriting)))
        plain, timed = (simulate(one, self._link, outside_bytes=outside) for one in (graph, rewritten))
        return Decided(self._captured, rewriting, rewritten, plain, timed, outside, self._calls.own_bytes)


def _measured(joined: Joined, clock: Measured, *, fused: bool) -> Captured:
    seconds = in_kernels(clock) if fused else clock
    captured = capture(joined.module, joined.halves.outputs, seconds=seconds)
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

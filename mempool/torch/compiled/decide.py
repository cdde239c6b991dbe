"""Decide for each value of a step to keep, offload or recompute it, according to the options."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from mempool.torch.compiled.costs import MeasuredCosts, copy_calls, fused_seconds, hint, roofline_seconds
from mempool.torch.compiled.external_memory import device_with_most
from mempool.torch.compiled.graph import capture
from mempool.torch.compiled.options import TUNABLES
from mempool.torch.compiled.records import (
    TICKET_BYTES,
    UNCONSTRAINED,
    Constraints,
    Extreme,
    HostPlacement,
    StepDecision,
)
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.offload.host_memory import PAGE, default_host_limit, pages
from mempool.torch.offload.host_placement import packed
from solvers.errors import PlanError
from solvers.rewriting import Rewriting, apply_rewriting
from solvers.rewriting.copy_overhead import CopyOverhead
from solvers.rewriting.decide import Decider
from solvers.rewriting.judge import simulate
from solvers.rewriting.pass_boundary import (
    Pause,
    add_backward_results,
    insert_pause,
    remove_pause,
    simulate_with_pause,
    split_by_pass,
)
from solvers.swap.link import PRESETS
from traces.buffers import Buffers

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import fx

    from mempool.torch.compiled.graph import CapturedGraph
    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.options import Options
    from solvers.rewriting import Graph, Rewriting
    from solvers.rewriting.records import Decision, Simulation
    from solvers.swap.link import Link


class StepDecider:
    """Decisions about one step, for any number of limits."""

    def __init__(self, step: Step, options: Options, constraints: Constraints = UNCONSTRAINED) -> None:
        """Prepare the graph; decide nothing yet.

        Args:
            step: the graphs and times.
            options: the options of the backend.
            constraints: the constraints on the decision.
        """
        self.step, self.options, self.constraints = step, options, constraints
        graph, captured, outside = step.decidable, step.captured, constraints.outside
        if constraints.gradients_stay:
            graph = graph.with_columns(
                lasting=graph.lasting | np.isin(graph.base, captured.incoming_gradients)
            )
        self._graph = add_backward_results(graph, outside.backward) if outside.backward else graph
        self._pauses = bool(self._graph.backward.any())
        freed_values = captured.results if constraints.keep_least and options.limit is not None else ()
        self._pause = Pause(
            constraints.between_bytes,
            outside.forward,
            (*freed_values, *constraints.freed_inputs),
            captured.incoming_gradients,
        )
        self._host_limit = (
            allowed_host_bytes(options) if constraints.host_limit is None else constraints.host_limit
        )
        self._deciders: dict[int, Decider] = {}

    def least_limit(self) -> int:
        """Return the lowest feasible limit in bytes."""
        return self._decider_with_room(self.constraints.between_bytes).least()[0]

    def decide(self) -> StepDecision:
        """Decide according to the options.

        Raises:
            PlanError: the limit is infeasible.
        """
        assert self.options.limit is not None
        return self.decide_within(self.options.limit)

    def decide_within(self, limit: int) -> StepDecision:
        """Decide according to the options, but for another limit.

        Raises:
            PlanError: the limit is infeasible.
        """
        constraints = self.constraints
        outside, keep, between_bytes = constraints.outside, constraints.keep_bytes, constraints.between_bytes
        if not constraints.keep_least or (room := self._largest_room(limit)) <= between_bytes:
            return self._decide_with_room(between_bytes, limit)
        if keep:
            tickets = TICKET_BYTES * int(self._graph.movable.sum())
            kept = outside.during(backward=False) + tickets + keep
            room = max(min(room, limit - kept), between_bytes)
        with contextlib.suppress(PlanError):
            return self._decide_with_room(room, limit)
        found = self._decide_with_room(between_bytes, limit)  # the host is too small
        fewest, most = limit - room, found.kept_bytes + outside.during(backward=False)
        for _ in range(TUNABLES.host_steps):
            middle = (fewest + most) // 2
            try:
                found, most = self._decide_with_room(limit - middle, limit), middle
            except PlanError:
                fewest = middle
        return found

    def kept_bytes(self, limit: int) -> int:
        """Return the bytes that a step within a limit keeps between the passes; all bytes if infeasible."""
        try:
            return self.decide_within(limit).kept_bytes
        except PlanError:
            return self._all_bytes

    def decide_extreme(self, extreme: Extreme) -> StepDecision:
        """Return a decision that depends on no measurement, so that each call returns the same decision.

        Raises:
            PlanError: the host is too small.
        """
        if extreme is Extreme.ALL:
            return self._convert(self._decider_with_room(self.constraints.between_bytes).offload_everything())
        nominal = self._nominal_decider
        limit = nominal.least_limit() if extreme is Extreme.LEAST else 2 * self._all_bytes
        return self.simulate_decision(nominal.decide_within(limit).rewriting)

    @cached_property
    def _nominal_decider(self) -> StepDecider:
        return StepDecider(
            self.step.nominal(), self.options, replace(self.constraints, host_limit=self._host_limit)
        )

    @cached_property
    def _all_bytes(self) -> int:
        """Return an upper bound on the bytes that a step can need."""
        graph = self._graph
        tickets = TICKET_BYTES * len(graph.size)
        outside = self.constraints.outside.during(backward=False)
        return outside + int(graph.size.sum() + graph.workspace.max(initial=0)) + tickets

    def _largest_room(self, limit: int) -> int:
        """Return the most additional bytes that a limit permits between the passes; 0 if infeasible."""
        if not self._pauses or limit < self.least_limit():
            return 0
        low = self.constraints.between_bytes
        high = limit - (self._decider_with_room(self._all_bytes).least()[0] - self._all_bytes)
        room = high
        for _ in range(TUNABLES.room_steps):
            if room <= low:
                break
            over = self._decider_with_room(room).least()[0] - limit
            if over <= 0:
                low = room - over  # a byte of room adds at most a byte to the least limit
            else:
                high = room - over
            room = (low + high + 1) // 2 if low < high else low
        return low

    def _decide_with_room(self, room: int, limit: int) -> StepDecision:
        """Decide within a limit, with `room` additional bytes in use between the passes."""
        return self._convert(self._decider_with_room(room).decide(limit))

    def _convert(self, made: Decision) -> StepDecision:
        """Convert a decision about the graph with a pause to one about the step."""
        rewriting = made.rewriting
        return self.simulate_decision(remove_pause(self._graph, rewriting) if self._pauses else rewriting)

    def _decider_with_room(self, room: int) -> Decider:
        """Return the decider for a graph with `room` additional bytes in use between the passes."""
        if room not in self._deciders:
            graph = self._graph
            if self._pauses:
                graph = insert_pause(graph, replace(self._pause, extra_bytes=room))
            self._deciders[room] = Decider(
                graph,
                self.step.link,
                overhead=self.step.calls,
                outside_bytes=self.constraints.outside.always + TICKET_BYTES * int(graph.movable.sum()),
                host_limit=self._host_limit,
                repeatable=~np.isin(graph.base, self._pause.leaving),
            )
        return self._deciders[room]

    def simulate_decision(self, rewriting: Rewriting) -> StepDecision:
        """Apply decisions to the step and simulate the result."""
        graph, step, outside = self._graph, self.step, self.constraints.outside
        # Apply the decisions as `graph_passes` applies them to the two graphs.
        rewritten = step.calls.applied_to(apply_rewriting(graph, split_by_pass(graph, rewriting)))
        return StepDecision(
            step.captured,
            rewriting,
            rewritten,
            self._simulate(graph),
            self._simulate(rewritten),
            outside,
            freed_values=self._pause.leaving,
            gradients_stay=self.constraints.gradients_stay,
            between_bytes=self.constraints.between_bytes,
            own_bytes=step.calls.inline_bytes,
        )

    def _simulate(self, graph: Graph) -> Simulation:
        link, outside = self.step.link, self.constraints.outside.always
        if self._pauses:
            return simulate_with_pause(graph, self._pause, link, outside_bytes=outside)
        return simulate(graph, link, outside_bytes=outside)


def allowed_host_bytes(options: Options) -> int:
    """Return the host bytes that copies may use."""
    return options.host_limit or default_host_limit()


@dataclass(frozen=True, eq=False)
class Step:
    """The graphs of a step and their times.

    Attributes:
        captured: the graphs as numbers, with seconds and workspaces.
        link: the transfer times of copies.
        calls: the seconds that copies cost the program itself.
        workspace: returns the workspace bytes of an operation while the operation runs.
        fused: true if the inner compiler fuses operations into kernels.
    """

    captured: CapturedGraph
    link: Link
    calls: CopyOverhead
    workspace: Callable[[fx.Node], int]
    fused: bool

    @cached_property
    def decidable(self) -> Graph:
        """Return the graph in which only values that can be offloaded are movable."""
        return decidable(self.captured)

    def nominal(self) -> Step:
        """Return the same step with nominal times, which depend on no device and no measurement."""
        modelled = roofline_seconds()
        seconds = fused_seconds(modelled) if self.fused else modelled
        columns = {"seconds": [seconds(node) for node in self.captured.operations]}
        captured = replace(self.captured, graph=self.captured.graph.with_columns(**columns))
        return replace(self, captured=captured, link=PRESETS["nvlink-c2c"], calls=CopyOverhead())


def measure_step(merged: MergedGraph, options: Options) -> Step:
    """Measure operations on the device, once per distinct call, and copies if no link is given."""
    device = device_of(merged.module)
    devices = [device] if device.type == "cuda" else []
    costs = measured_costs_of(device, torch.get_num_threads())
    with _disable_current_modes(), torch.random.fork_rng(devices):
        seconds = fused_seconds(costs) if options.fused else costs
        captured = capture(merged.module, merged.halves.outputs, seconds=seconds)
        workspace = [costs.workspace(node) for node in captured.operations]
        captured = replace(captured, graph=captured.graph.with_columns(workspace=workspace))
        link, calls = options.link, CopyOverhead()
        if link is None:
            calls = copy_calls(device, options.host_limit)
            link = calls.overlapped(RUNTIME.engine(device, options.host_limit).link())
    return Step(captured, link, calls, costs.workspace, options.fused)


@cache
def measured_costs_of(device: torch.device, threads: int) -> MeasuredCosts:  # noqa: ARG001  # part of the key
    """Return the measured times of operations on a device, kept for the life of the process.

    At a recompilation the program already holds memory, and a second measurement would need more.
    """
    return MeasuredCosts(device)


def device_of(module: torch.fx.GraphModule) -> torch.device:
    """Return the device that holds most bytes of a graph's inputs."""
    found: dict[torch.device, int] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        held = node.meta.get("val")
        if isinstance(held, torch.Tensor):
            size = int(hint(held.numel())) * held.element_size()
            found[held.device] = found.get(held.device, 0) + size
    return device_with_most(found)


def decidable(captured: CapturedGraph) -> Graph:
    """Return the graph in which only whole memories from the forward pass are movable."""
    graph = captured.graph
    forward = ~graph.backward[graph.producer] & (graph.producer >= 0)
    whole = [node is not None and _is_whole(node.meta.get("val")) for node in captured.values]
    return graph.with_columns(movable=graph.movable & (forward & np.array(whole, bool))[graph.base])


def _is_whole(held: Any) -> bool:
    """Return true if a traced value is a dense tensor that covers its whole storage."""
    if not isinstance(held, torch.Tensor) or held.layout != torch.strided or held.is_quantized:
        return False
    if held.is_conj() or held.is_neg():
        return False
    shape, strides = map(hint, held.shape), map(hint, held.stride())
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    return bool(extent * held.element_size() >= hint(held.untyped_storage().nbytes()) > 0)


def place_copies(graph: Graph, rewriting: Rewriting) -> HostPlacement:
    """Return the offset in the host arena of each offloaded value's copy.

    A copy lives from the operation that makes the value to the last reader of the reloaded value, or to the
    end of the step if that reader runs twice.

    Args:
        graph: the step before the decisions are applied.
        rewriting: the decisions.
    """
    swaps = rewriting.offloads
    if not swaps:
        return HostPlacement()
    count = len(graph)
    values = [swap.value for swap in swaps]
    ends = [
        max((run for reload in swap.reloads for run in reload.consumers), default=count) for swap in swaps
    ]
    sizes = [pages(int(size)) for size in graph.size[values]]
    buffers = Buffers.of(graph.producer[values], np.minimum(ends, count) + 1, sizes, alignment=PAGE)
    at, size = packed(buffers)
    return HostPlacement(dict(zip(values, at.tolist(), strict=True)), size)

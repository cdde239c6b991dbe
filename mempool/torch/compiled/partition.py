"""Partition a joint graph with PyTorch's own partitioner, then apply the decision to both graphs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse, get_aten_target, rand_ops
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from mempool.torch.compiled.costs import StepTimer
from mempool.torch.compiled.decide import device_of, measure_step, place_copies
from mempool.torch.compiled.graph import capture, is_ordered
from mempool.torch.compiled.graph_passes import apply
from mempool.torch.compiled.inductor.patches import donated_inputs
from mempool.torch.compiled.joint_graph import GraphPair, join, output_of
from mempool.torch.compiled.recompile_guard import RunGuard
from mempool.torch.compiled.records import NO_EXTERNAL_MEMORY, CompiledGraph, ExternalMemory
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.shared_limit import GraphUnderLimit
from solvers.rewriting.judge import simulate
from solvers.swap.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mempool.torch.compiled.inductor.kernels import Kernels
    from mempool.torch.compiled.joint_graph import MergedGraph
    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.records import StepDecision
    from mempool.torch.compiled.shared_limit import SharedLimit
    from solvers.rewriting import Graph


@dataclass(frozen=True)
class Partition:
    """The partitioner of joint graphs for one compiled graph.

    Without a limit, the graphs are those of PyTorch's partitioner for the inner compiler.

    Attributes:
        options: the options of the backend.
        shared_limit: the graphs that share the limit.
        number: the number of the graph being compiled.
        more: true if the function continues after this graph.
        argument_count: number of arguments of the function.
        external: known memory in use outside the graph when the graph is compiled.
        timer: the times of the two graphs.
        passes: kernel passes of the forward graph (False) and the backward graph (True), if fused.
        donated: positions of the backward inputs that a compiler may overwrite.
    """

    options: Options
    shared_limit: SharedLimit
    number: int = 0
    more: bool = False
    argument_count: int = 0
    external: ExternalMemory = NO_EXTERNAL_MEMORY
    timer: StepTimer = field(default_factory=StepTimer)
    passes: dict[bool, Kernels] = field(default_factory=dict)
    donated: list[int] = field(default_factory=list)

    @cached_property
    def guard(self) -> RunGuard:
        """Return the observer of the graph's runs."""
        return RunGuard(self.shared_limit.observer, self.shared_limit.graphs, self.number)

    @property
    def forward_only_limit(self) -> int | None:
        """Return the limit if the compiled graph has no backward pass."""
        return self.options.limit if self.guard.compiled is None else None

    @property
    def outside_bytes(self) -> int:
        """Return the bytes in use outside a graph without a backward pass."""
        external = self.external
        always = max(self.options.beside, external.state) + external.library
        return always + external.held + external.own + external.parameters

    def wrap(self, run: Callable[..., Any], inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        """Wrap the run of one graph with timing and, under a limit, with observation."""
        timed = self.timer.wrap(run, inputs, backward=backward)
        return timed if self.options.limit is None else self.guard.wrap(timed, backward=backward)

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph."""
        options = self.options
        partitioner: Any = default_partition
        if options.fused:
            partitioner, others["compiler"] = min_cut_rematerialization_partition, "inductor"
        elif options.limit is not None:
            eliminate_common_subexpressions(joint)
        forward, backward = partitioner(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if options.limit is not None:
            _warn_of_subgraphs(joint)
            self.guard.results = num_fwd_outputs
            merged = join(GraphPair(forward, backward, num_fwd_outputs), stale=options.fused)
            external = self.external
            if not has_one_input_per_argument(joint, self.argument_count):
                external = replace(external, freed_inputs=())
            self._rewrite(
                merged, GraphUnderLimit(options, self.shared_limit, self.number, self.more, external)
            )
            self.guard.incoming_gradients = incoming_gradients(backward)
        return forward, backward

    def _rewrite(self, merged: MergedGraph, graph: GraphUnderLimit) -> None:
        """Decide about the merged graph and apply the decision to both graphs."""
        step = measure_step(merged, self.options)
        graph = graph.with_limit_in_bytes(merged, step)
        options = graph.options
        decision, kept_bytes_at, limit = graph.decide(merged, step)
        places, host_end = self._reserve_host(merged, decision, graph.runs)
        apply(
            merged,
            decision.captured,
            decision.rewriting,
            host_limit=options.host_limit,
            own_bytes=decision.own_bytes,
            places=places,
        )
        if options.fused:
            self.donated.extend(donated_inputs(merged, decision))
        if decision.kernel_memory is not None:
            from mempool.torch.compiled.inductor.kernels import kernel_passes

            small = decision.kernel_memory.small
            self.passes.update(kernel_passes(merged, decision, step.workspace, limit or 0, small=small))
        self.guard.compiled = CompiledGraph(
            self.number,
            self.more,
            options,
            decision,
            self.timer,
            external=graph.counted_external,
            host_end=host_end,
            bytes_kept_before=self.shared_limit.bytes_kept_before(self.number),
            kept_bytes_at=kept_bytes_at if self.more and options.limit is not None else None,
            least_limit_bytes=graph.least_limit(merged, step),
        )
        self.shared_limit.add(self.guard.compiled)

    def _reserve_host(
        self, merged: MergedGraph, decision: StepDecision, runs: int
    ) -> tuple[Mapping[int, int], int]:
        """Reserve host memory for the copies of all runs; return the offset by value, and the end."""
        begin = self.shared_limit.host_before(self.number)
        places = place_copies(decision.captured.graph, decision.rewriting).shift(begin)
        host_end = begin + places.size * runs  # other runs use the offsets behind
        if places.at:
            with _disable_current_modes():
                RUNTIME.engine(device_of(merged.module), self.options.host_limit).reserve(host_end)
        return places.at, host_end


def _warn_of_subgraphs(joint: fx.GraphModule) -> None:
    if subgraphs := subgraph_operations(joint):
        warnings.warn(
            f"the memory needed inside {', '.join(subgraphs)} is unknown and not part of the limit",
            stacklevel=2,
        )


def incoming_gradients(backward: fx.GraphModule) -> slice:
    """Return the contiguous range of a backward graph's inputs that are gradients."""
    inputs = backward.graph.find_nodes(op="placeholder")
    places = [i for i, node in enumerate(inputs) if "tangents" in str(node.target)]
    return slice(min(places, default=len(inputs)), max(places, default=-1) + 1)


def has_one_input_per_argument(joint: fx.GraphModule, count: int) -> bool:
    """Return true if the joint graph has one input per argument; false if arguments share memory."""
    return count == sum("primals" in str(node.target) for node in joint.graph.find_nodes(op="placeholder"))


def subgraph_operations(joint: fx.GraphModule) -> list[str]:
    """Return the names of operations that run graphs of their own, such as branches."""

    def is_graph(node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(getattr(joint, str(node.target), None), fx.GraphModule)

    calls = joint.graph.nodes
    return sorted(
        {str(node.target) for node in calls if any(map(is_graph, node.all_input_nodes))} - {"output"}
    )


def eliminate_common_subexpressions(joint: fx.GraphModule) -> None:
    """Eliminate common subexpressions, as PyTorch's other partitioner does.

    The pass is skipped if it might merge two random draws or two calls of a foreign operator.
    """
    ordered = (node for node in joint.graph.nodes if is_ordered(node))
    if config.cse and all(get_aten_target(node) in rand_ops for node in ordered):
        joint.graph = fx_graph_cse(joint.graph)


def forward_peak(graph: fx.GraphModule, outside_bytes: int) -> int:
    """Return the peak in bytes of a graph that runs unchanged, outside bytes included."""
    captured = _captured_graph(graph)
    return simulate(captured, Link.of_rate(1.0), outside_bytes=outside_bytes).peak_bytes


def forward_kernels(graph: fx.GraphModule, outside_bytes: int, limit: int) -> Kernels:
    """Return the inductor pass that counts the bytes in use at each kernel of a forward graph."""
    from mempool.torch.compiled.inductor.kernels import Kernels

    captured = _captured_graph(graph)
    argument_count = int(captured.size[(captured.producer < 0) & ~captured.host].sum())
    return Kernels(outside_bytes + argument_count, {}, {}, limit=limit)


def warn_above_limit(needed: int, limit: int) -> None:
    """Warn if a graph needs more than the limit."""
    if needed > limit:
        warnings.warn(
            f"a graph has no backward pass, and needs {needed} bytes where the limit is {limit}: "
            "it runs all the same, as it is",
            stacklevel=2,
        )


def _captured_graph(graph: fx.GraphModule) -> Graph:
    (returned,) = output_of(graph).args
    return capture(graph, len(returned)).graph

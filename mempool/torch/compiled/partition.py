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
from mempool.torch.compiled.decide import device_of, measured, place_copies
from mempool.torch.compiled.graph import capture, is_ordered
from mempool.torch.compiled.inductor.patches import donated
from mempool.torch.compiled.joint_graph import GraphPair, join, output_of
from mempool.torch.compiled.passes import apply
from mempool.torch.compiled.recompile_guard import RunGuard
from mempool.torch.compiled.records import NO_EXTERNAL_MEMORY, CompiledGraph, ExternalMemory
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.shared_limit import GraphUnderLimit
from solvers.rewriting.judge import simulate
from solvers.swap.link import Link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.compiled.inductor.kernels import Kernels
    from mempool.torch.compiled.options import Options
    from mempool.torch.compiled.shared_limit import SharedLimit
    from solvers.rewriting import Graph


@dataclass(frozen=True)
class Partition:
    """The partitioner of joint graphs for one compiled graph.

    Without a limit or threshold nothing is changed: the graphs are those of PyTorch's partitioner for the
    inner compiler.

    Attributes:
        options: the options of the backend.
        budget: the graphs that share the limit.
        number: the number of the graph being compiled.
        more: true if the function continues after this graph.
        given: number of arguments of the function.
        beside: memory in use outside the graph, as far as known when the graph is compiled.
        clock: the times of the two graphs.
        passes: kernel passes of the forward graph (False) and the backward graph (True), if fused.
        donated: positions of the backward inputs that a compiler may overwrite.
    """

    options: Options
    budget: SharedLimit
    number: int = 0
    more: bool = False
    given: int = 0
    beside: ExternalMemory = NO_EXTERNAL_MEMORY
    clock: StepTimer = field(default_factory=StepTimer)
    passes: dict[bool, Kernels] = field(default_factory=dict)
    donated: list[int] = field(default_factory=list)

    @cached_property
    def watch(self) -> RunGuard:
        """Return the observer of the graph's runs."""
        return RunGuard(self.budget.observer, self.budget.parts, self.number)

    @property
    def forward_only_limit(self) -> int | None:
        """Return the limit if the compiled graph has no backward pass."""
        return self.options.limit if self.watch.part is None else None

    @property
    def outside_bytes(self) -> int:
        """Return the bytes in use outside a graph without a backward pass."""
        beside = self.beside
        always = max(self.options.beside, beside.state) + beside.library
        return always + beside.held + beside.own + beside.parameters

    def around(self, run: Callable[..., Any], inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        """Wrap the run of one graph with timing and, under a limit, with observation."""
        timed = self.clock.around(run, inputs, backward=backward)
        return timed if self.options.limit is None else self.watch.around(timed, backward=backward)

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph."""
        options = self.options
        divide: Any = default_partition
        if options.fused:
            divide, others["compiler"] = min_cut_rematerialization_partition, "inductor"
        elif options.rewrites:
            eliminate_common_subexpressions(joint)
        forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if not options.rewrites:
            return forward, backward
        self.watch.results = num_fwd_outputs
        joined = join(GraphPair(forward, backward, num_fwd_outputs), stale=options.fused)
        if inside := branches(joint):
            warnings.warn(
                f"what is needed inside of {', '.join(inside)} is not known, and no part of the limit",
                stacklevel=2,
            )
        step = measured(joined, options)
        beside = (
            self.beside if has_one_input_per_argument(joint, self.given) else replace(self.beside, going=())
        )
        among = GraphUnderLimit(options, self.budget, self.number, self.more, beside)
        made, keeps, limit = among.decide(joined, step)
        begin = self.budget.host_before(self.number)
        places = place_copies(made.captured.graph, made.rewriting).shifted(begin)
        host_end = begin + places.size * among.runs  # other runs get the places behind
        if places.at:
            with _disable_current_modes():
                RUNTIME.engine(device_of(joined.module), options.host_limit).reserve(host_end)
        apply(
            joined,
            made.captured,
            made.rewriting,
            host_limit=options.host_limit,
            own_bytes=made.own_bytes,
            places=places.at,
        )
        self.watch.incoming = incoming(backward)
        if options.fused:
            self.donated.extend(donated(joined, made))
        if made.needed is not None:
            from mempool.torch.compiled.inductor.kernels import passes_of

            small = made.needed.small
            self.passes.update(passes_of(joined, made, step.workspace, limit or 0, small=small))
        self.watch.part = CompiledGraph(
            self.number,
            self.more,
            options,
            made,
            self.clock,
            beside=among.counted,
            host_end=host_end,
            bytes_kept_before=self.budget.bytes_kept_before(self.number),
            keeps=keeps if self.more and options.limit is not None else None,
        )
        self.budget.add(self.watch.part)
        return forward, backward


def incoming(backward: fx.GraphModule) -> slice:
    """Return the contiguous range of a backward graph's inputs that are gradients."""
    inputs = backward.graph.find_nodes(op="placeholder")
    places = [i for i, node in enumerate(inputs) if "tangents" in str(node.target)]
    return slice(min(places, default=len(inputs)), max(places, default=-1) + 1)


def has_one_input_per_argument(joint: fx.GraphModule, count: int) -> bool:
    """Return true if the joint graph has one input per function argument: false if arguments share memory."""
    return count == sum("primals" in str(node.target) for node in joint.graph.find_nodes(op="placeholder"))


def branches(joint: fx.GraphModule) -> list[str]:
    """Return the names of operations that run graphs of their own, such as branches."""

    def is_graph(node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(getattr(joint, str(node.target), None), fx.GraphModule)

    calls = joint.graph.nodes
    return sorted(
        {str(node.target) for node in calls if any(map(is_graph, node.all_input_nodes))} - {"output"}
    )


def eliminate_common_subexpressions(joint: fx.GraphModule) -> None:
    """Eliminate common subexpressions, as PyTorch's other partitioner does.

    The pass is skipped where two random draws or two calls of a foreign operator might be merged.
    """
    ordered = (node for node in joint.graph.nodes if is_ordered(node))
    if config.cse and all(get_aten_target(node) in rand_ops for node in ordered):
        joint.graph = fx_graph_cse(joint.graph)


def forward_peak(graph: fx.GraphModule, outside_bytes: int) -> int:
    """Return the peak in bytes of a graph that runs unchanged, outside bytes included."""
    captured = _captured_graph(graph)
    return simulate(captured, Link.of_rate(1.0), outside_bytes=outside_bytes).peak_bytes


def forward_kernels(graph: fx.GraphModule, outside_bytes: int, limit: int) -> Kernels:
    """Return a pass over the inductor kernels of a graph that counts the bytes in use."""
    from mempool.torch.compiled.inductor.kernels import Kernels

    captured = _captured_graph(graph)
    given = int(captured.size[(captured.producer < 0) & ~captured.host].sum())
    return Kernels(outside_bytes + given, {}, {}, limit=limit)


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

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

from mempool.torch.compiled.effects import is_ordered
from mempool.torch.compiled.external_memory import NOTHING, Beside
from mempool.torch.compiled.graph_budget import Part
from mempool.torch.compiled.host_placement import places_of
from mempool.torch.compiled.inductor.donated import donated
from mempool.torch.compiled.merged_graph import Halves, join
from mempool.torch.compiled.passes.apply import apply
from mempool.torch.compiled.recompile_guard import Watch
from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.shared_limit import Among
from mempool.torch.compiled.step import device_of, measured
from mempool.torch.compiled.step_timing import Clock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.compiled.graph_budget import Budget
    from mempool.torch.compiled.inductor.kernels import Kernels
    from mempool.torch.compiled.options import Options


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
    budget: Budget
    number: int = 0
    more: bool = False
    given: int = 0
    beside: Beside = NOTHING
    clock: Clock = field(default_factory=Clock)
    passes: dict[bool, Kernels] = field(default_factory=dict)
    donated: list[int] = field(default_factory=list)

    @cached_property
    def watch(self) -> Watch:
        """Return the observer of the graph's runs."""
        return Watch(self.budget.looks, self.budget.parts, self.number)

    @property
    def limit_alone(self) -> int | None:
        """Return the limit if the compiled graph has no backward pass."""
        return self.options.limit if self.watch.part is None else None

    @property
    def outside_bytes(self) -> int:
        """Return the bytes in use outside a graph without a backward pass."""
        beside = self.beside
        always = max(self.options.beside, beside.state) + beside.library
        return always + beside.held + beside.own + beside.parameters

    def around(self, run: Callable[..., Any], inputs: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        """Wrap the run of one graph with timing and, under a limit, with observation; see `Clock.around`."""
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
            compute_once(joint)
        forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if not options.rewrites:
            return forward, backward
        self.watch.results = num_fwd_outputs
        joined = join(Halves(forward, backward, num_fwd_outputs), stale=options.fused)
        if inside := branches(joint):
            warnings.warn(
                f"what is needed inside of {', '.join(inside)} is not known, and no part of the limit",
                stacklevel=2,
            )
        step = measured(joined, options)
        beside = self.beside if given_as_told(joint, self.given) else replace(self.beside, going=())
        among = Among(options, self.budget, self.number, self.more, beside)
        made, keeps, limit = among.decide(joined, step)
        begin = self.budget.host_before(self.number)
        places = places_of(made.captured.graph, made.rewriting).behind(begin)
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
        self.watch.part = Part(
            self.number,
            self.more,
            options,
            made,
            self.clock,
            beside=among.counted,
            host_end=host_end,
            kept_before=self.budget.kept_before(self.number),
            keeps=keeps if self.more and options.limit is not None else None,
        )
        self.budget.add(self.watch.part)
        return forward, backward


def incoming(backward: fx.GraphModule) -> slice:
    """Return the contiguous range of a backward graph's inputs that are gradients."""
    inputs = backward.graph.find_nodes(op="placeholder")
    places = [i for i, node in enumerate(inputs) if "tangents" in str(node.target)]
    return slice(min(places, default=len(inputs)), max(places, default=-1) + 1)


def given_as_told(joint: fx.GraphModule, count: int) -> bool:
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


def compute_once(joint: fx.GraphModule) -> None:
    """Eliminate common subexpressions, as PyTorch's other partitioner does.

    The pass is skipped where two random draws or two calls of a foreign operator might be merged.
    """
    ordered = (node for node in joint.graph.nodes if is_ordered(node))
    if config.cse and all(get_aten_target(node) in rand_ops for node in ordered):
        joint.graph = fx_graph_cse(joint.graph)

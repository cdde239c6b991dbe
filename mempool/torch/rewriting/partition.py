"""The partition of a joint graph: PyTorch's own, whose two graphs then do what was decided."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import fx
from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse, get_aten_target, rand_ops
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch.utils._python_dispatch import _disable_current_modes

from mempool.torch.rewriting.applied import apply
from mempool.torch.rewriting.budget import Part
from mempool.torch.rewriting.clock import Clock
from mempool.torch.rewriting.decide import Deciding
from mempool.torch.rewriting.effects import is_ordered
from mempool.torch.rewriting.host_places import places_of
from mempool.torch.rewriting.joined import Halves, join
from mempool.torch.rewriting.runtime import RUNTIME
from mempool.torch.rewriting.step import device_of, measured
from solvers.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mempool.torch.rewriting.budget import Budget
    from mempool.torch.rewriting.decided import Decided
    from mempool.torch.rewriting.joined import Joined
    from mempool.torch.rewriting.kernels import Kernels
    from mempool.torch.rewriting.options import Options


@dataclass(frozen=True)
class Partition:
    """Divides joint graphs for one call of `torch.compile`.

    Without a limit nothing is changed: graphs are what PyTorch's partitioner makes for that inner compiler.
    A graph that is not the last one of its function keeps as little as it can, since nobody knows yet what
    the next ones need.

    Attributes:
        options: what was asked for.
        budget: the graphs that share the limit.
        frame: of the graph that is compiled.
        more: whether its function goes on after it.
        clock: of its two graphs.
        passes: over the kernels of the forward and, under True, of the backward graph, where they are fused.
    """

    options: Options
    budget: Budget
    frame: int = 0
    more: bool = False
    clock: Clock = field(default_factory=Clock)
    passes: dict[bool, Kernels] = field(default_factory=dict)

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph."""
        options = self.options
        divide: Any = default_partition
        if options.fused:
            divide, others["compiler"] = min_cut_rematerialization_partition, "inductor"
        elif options.rewrites:
            compute_once(joint)
        forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if not options.rewrites:
            return forward, backward
        joined = join(Halves(forward, backward, num_fwd_outputs), stale=options.fused)
        if inside := branches(joint):
            warnings.warn(
                f"what is needed inside of {', '.join(inside)} is not known, and no part of the limit",
                stacklevel=2,
            )
        kept = self.budget.kept_before(self.frame)
        step = measured(joined, options)
        deciding = Deciding(step, options, options.beside + kept, least=self.more)
        try:
            made, keeps = self._fitted(joined, deciding) if options.fused else _decided(deciding)
        except PlanError as error:
            raise self._refusal(error, kept) from None
        begin = self.budget.host_before(self.frame)
        places = places_of(made.captured.graph, made.rewriting).behind(begin)
        if places.at:
            with _disable_current_modes():
                RUNTIME.engine(device_of(joined.module), options.host_limit).reserve(begin + places.size)
        apply(
            joined,
            made.captured,
            made.rewriting,
            host_limit=options.host_limit,
            own_bytes=made.own_bytes,
            places=places.at,
        )
        if made.needed is not None:
            from mempool.torch.rewriting.kernels import passes_of

            small = made.needed.small
            self.passes.update(passes_of(joined, made, step.workspace, options.limit or 0, small=small))
        known = keeps if self.more and options.limit is not None else None
        self.budget.add(Part(self.frame, self.more, options, made, self.clock, begin + places.size, known))
        return forward, backward

    def _refusal(self, error: PlanError, kept: int) -> PlanError:
        """What is said of a limit that cannot be held beside what graphs before this one keep."""
        limit, least, beside = self.options.limit, error.least_bytes, self.options.beside
        said = [str(error)]
        if kept:
            said.append(f"of that, graphs before it keep {kept} bytes")
        if kept and limit is not None and least is not None:
            enough = self.budget.enough(self.frame, limit, least)
            if enough < least:
                fewer = self.budget.kept_within(self.frame, enough)
                said[-1] += f", but {fewer} within a limit of {enough}, which is enough"
                least = enough
        if beside:
            said.append(f"of that, {beside} bytes lie beside")
        return PlanError("; ".join(said), least)

    def _fitted(self, joined: Joined, deciding: Deciding) -> tuple[Decided, Callable[[int], int]]:
        """A decision about graphs whose operations are fused, and what they keep within other limits."""
        limit = self.options.limit
        if limit is None:
            return _decided(deciding)
        try:
            from mempool.torch.rewriting.fused import fitted

            made, looked = fitted(joined, deciding, limit)
            return made, partial(kept_by, looked)
        except PlanError:
            raise
        except Exception as error:  # it goes deep into a compiler that is somebody else's
            warnings.warn(
                f"what fused operations need is not found, and the limit counts each by itself: {error}",
                stacklevel=2,
            )
            return _decided(deciding)


def _decided(deciding: Deciding) -> tuple[Decided, Callable[[int], int]]:
    """A decision, and what is kept within other limits."""
    return deciding.decide(), deciding.kept_bytes


def kept_by(looked: Sequence[Decided], limit: int) -> int:
    """The fewest bytes that any decision keeps between the passes of those that are within a limit."""
    within = [made.kept_bytes for made in looked if made.peak_bytes <= limit]
    return min(within, default=max(made.kept_bytes for made in looked))


def branches(joint: fx.GraphModule) -> list[str]:
    """Operations of a graph that run graphs of their own, such as branches: their names."""

    def is_graph(node: fx.Node) -> bool:
        return node.op == "get_attr" and isinstance(getattr(joint, str(node.target), None), fx.GraphModule)

    calls = joint.graph.nodes
    return sorted(
        {str(node.target) for node in calls if any(map(is_graph, node.all_input_nodes))} - {"output"}
    )


def compute_once(joint: fx.GraphModule) -> None:
    """Compute once what is computed several times, as PyTorch's other partitioner does.

    Not where that might take two draws, or two calls of somebody's operator, for the same.
    """
    ordered = (node for node in joint.graph.nodes if is_ordered(node))
    if config.cse and all(get_aten_target(node) in rand_ops for node in ordered):
        joint.graph = fx_graph_cse(joint.graph)

"""The partition of a joint graph: PyTorch's own, whose two graphs then do what was decided."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch._functorch import config
from torch._functorch.compile_utils import fx_graph_cse, get_aten_target, rand_ops
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from mempool.torch.rewriting.applied import apply
from mempool.torch.rewriting.budget import Part
from mempool.torch.rewriting.clock import Clock
from mempool.torch.rewriting.decide import decided
from mempool.torch.rewriting.effects import is_ordered
from mempool.torch.rewriting.joined import Halves, join
from solvers.errors import PlanError

if TYPE_CHECKING:
    from torch import fx

    from mempool.torch.rewriting.budget import Budget
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
    """

    options: Options
    budget: Budget
    frame: int = 0
    more: bool = False
    clock: Clock = field(default_factory=Clock)

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph."""
        options = self.options
        if options.inner == "eager":
            divide: Any = default_partition
            if options.limit is not None or options.threshold is not None:
                compute_once(joint)
        else:
            divide, others["compiler"] = min_cut_rematerialization_partition, "inductor"
        forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if options.limit is None and options.threshold is None:
            return forward, backward
        joined = join(Halves(forward, backward, num_fwd_outputs), stale=options.inner != "eager")
        kept = self.budget.kept_before(self.frame)
        try:
            made = decided(joined, options, options.beside + kept, least=self.more)
        except PlanError as error:
            before = f"; of that, graphs before it keep {kept} bytes" if kept else ""
            beside = f"; of that, {options.beside} bytes lie beside" if options.beside else ""
            raise PlanError(f"{error}{before}{beside}") from None
        apply(
            joined,
            made.captured,
            made.rewriting,
            host_limit=options.host_limit,
            own_bytes=made.own_bytes,
        )
        self.budget.add(Part(self.frame, self.more, options, made, self.clock))
        return forward, backward


def compute_once(joint: fx.GraphModule) -> None:
    """Compute once what is computed several times, as PyTorch's other partitioner does.

    Not where that might take two draws, or two calls of somebody's operator, for the same.
    """
    ordered = (node for node in joint.graph.nodes if is_ordered(node))
    if config.cse and all(get_aten_target(node) in rand_ops for node in ordered):
        joint.graph = fx_graph_cse(joint.graph)

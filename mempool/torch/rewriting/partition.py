"""The partition of a joint graph: PyTorch's own, whose two graphs then do what was decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

from mempool.torch.rewriting.applied import apply
from mempool.torch.rewriting.decide import decided
from mempool.torch.rewriting.joined import Halves, join

if TYPE_CHECKING:
    from torch import fx

    from mempool.torch.rewriting.options import Options


@dataclass(frozen=True)
class Partition:
    """Divides joint graphs for one call of `torch.compile`.

    Without a limit nothing is changed: graphs are what PyTorch's partitioner makes for that inner compiler.
    """

    options: Options

    def __call__(
        self, joint: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **others: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The forward and the backward graph."""
        if self.options.inner == "eager":
            divide: Any = default_partition
        else:
            divide, others["compiler"] = min_cut_rematerialization_partition, "inductor"
        forward, backward = divide(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        if self.options.limit is None and self.options.threshold is None:
            return forward, backward
        joined = join(Halves(forward, backward, num_fwd_outputs), stale=self.options.inner != "eager")
        made = decided(joined, self.options, self.options.beside)
        apply(joined, made.captured, made.rewriting, host_limit=self.options.host_limit)
        return forward, backward

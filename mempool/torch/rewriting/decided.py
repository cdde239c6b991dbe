"""What was decided about a step, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from solvers.rewriting.pauses import between

if TYPE_CHECKING:
    from mempool.torch.rewriting.capture import Captured
    from mempool.torch.rewriting.fused import Needed
    from solvers.rewriting import Graph, Rewriting
    from solvers.rewriting.timed import Timed


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
        needed: what it needs once its operations are fused; None: they are not.
    """

    captured: Captured
    rewriting: Rewriting
    rewritten: Graph
    plain: Timed
    timed: Timed
    outside_bytes: int
    own_bytes: int = 0
    needed: Needed | None = None

    @property
    def moves(self) -> bool:
        """Whether anything leaves or is made again."""
        return bool(self.rewriting.swaps or self.rewriting.recomputed)

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device, as predicted."""
        return self.timed.peak_bytes if self.needed is None else self.needed.peak_bytes

    @property
    def kept_bytes(self) -> int:
        """What is on the device between the forward and the backward pass.

        Results do not count: the next graph is given them.
        """
        graph = self.rewritten
        if not graph.backward.any():
            return 0
        outputs = self.captured.outputs[: self.captured.forward_outputs]
        results = {int(graph.base[v]) for v in outputs if v >= 0}
        given = sum(int(graph.size[v]) for v in results if graph.producer[v] >= 0)
        kept = between(graph) if self.needed is None else self.needed.kept_bytes - self.outside_bytes
        return max(kept - given, 0)

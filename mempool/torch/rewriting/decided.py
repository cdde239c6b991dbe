"""What was decided about a step, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.pauses import between

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.torch.rewriting.capture import Captured
    from mempool.torch.rewriting.fused import Needed
    from mempool.torch.rewriting.terms import Outside
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
        outside: what lies on the device beside it.
        leaving: what it is given, and results, that are gone after its forward pass but for those it keeps.
        gradients_stay: whether what its backward pass is given is there until that ends.
        taken: bytes that somebody else takes for a while between its passes.
        own_bytes: copies of at most so many bytes the program makes itself.
        needed: what it needs once its operations are fused; None: they are not.
    """

    captured: Captured
    rewriting: Rewriting
    rewritten: Graph
    plain: Timed
    timed: Timed
    outside: Outside
    leaving: tuple[int, ...] = ()
    gradients_stay: bool = False
    taken: int = 0
    own_bytes: int = 0
    needed: Needed | None = None

    @property
    def results_leave(self) -> bool:
        """Whether it counts on its results to be gone when its backward pass begins."""
        return not set(self.leaving).isdisjoint(self.captured.results)

    @property
    def lasting(self) -> NDArray[np.bool_]:
        """Values whose memory stays for the whole step, of those that it counts on: bool[M]."""
        graph = self.captured.graph
        result: NDArray[np.bool_] = graph.lasting & ~np.isin(graph.base, self.leaving)
        return result

    @property
    def moves(self) -> bool:
        """Whether anything leaves or is made again."""
        return bool(self.rewriting.swaps or self.rewriting.recomputed)

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device, as predicted."""
        own = self.timed.peak_bytes if self.needed is None else self.needed.peak_bytes
        return max(own, self.pause_bytes(self.taken)) if self.taken else own

    def pause_bytes(self, taken: int) -> int:
        """Bytes on the device between its passes, where somebody else takes so many."""
        return self.kept_bytes + self.outside.during(backward=False) + taken

    def peak_of(self, *, backward: bool) -> int:
        """The same of one of the passes."""
        if self.needed is not None:
            return self.needed.backward_bytes if backward else self.needed.forward_bytes
        return int(self.timed.load[self.rewritten.backward == backward].max(initial=0))

    @property
    def kept_bytes(self) -> int:
        """What is on the device between the forward and the backward pass, of the graphs themselves."""
        captured = self.captured
        if self.needed is not None:
            gradients = int(captured.graph.size[list(captured.incoming)].sum())
            return self.needed.kept_bytes - self.outside.during(backward=True) - gradients
        return between(self.rewritten, captured.incoming) if self.rewritten.backward.any() else 0

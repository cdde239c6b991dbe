"""The decision about a step and the peak and time predicted for the rewritten step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from solvers.rewriting.pass_boundary import bytes_between_passes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mempool.torch.compiled.capture import Captured
    from mempool.torch.compiled.constraints import Outside
    from mempool.torch.compiled.inductor.fused import Needed
    from solvers.rewriting import Graph, Rewriting
    from solvers.rewriting.records import Simulation


@dataclass(frozen=True, eq=False)
class Decided:
    """A decision about a step, with the predictions for that decision.

    Attributes:
        captured: the numbered graph that the decision refers to.
        rewriting: the decision: values to offload and values to recompute.
        rewritten: the graph with the decision applied.
        plain: the simulation of the original graph.
        timed: the simulation of the rewritten graph.
        outside: bytes in use on the device outside the graph.
        leaving: inputs and results assumed to be freed after the forward pass unless the step keeps them.
        gradients_stay: true if the gradients given to the backward pass stay alive until the pass ends.
        taken: bytes that other code uses temporarily between the two passes.
        own_bytes: size limit in bytes up to which the program makes copies itself.
        needed: memory need of the fused kernels; None if operations are not fused.
    """

    captured: Captured
    rewriting: Rewriting
    rewritten: Graph
    plain: Simulation
    timed: Simulation
    outside: Outside
    leaving: tuple[int, ...] = ()
    gradients_stay: bool = False
    taken: int = 0
    own_bytes: int = 0
    needed: Needed | None = None

    @property
    def results_leave(self) -> bool:
        """Return true if the decision assumes that the results are freed when the backward pass begins."""
        return not set(self.leaving).isdisjoint(self.captured.results)

    @property
    def lasting(self) -> NDArray[np.bool_]:
        """Return the mask of the values whose memory counts as allocated for the whole step: bool[M]."""
        graph = self.captured.graph
        result: NDArray[np.bool_] = graph.lasting & ~np.isin(graph.base, self.leaving)
        return result

    @property
    def moves(self) -> bool:
        """Return true if any value is offloaded or recomputed."""
        return bool(self.rewriting.offloads or self.rewriting.recomputed)

    @property
    def peak_bytes(self) -> int:
        """Return the predicted peak on the device in bytes."""
        own = self.timed.peak_bytes if self.needed is None else self.needed.peak_bytes
        return max(own, self.pause_bytes(self.taken)) if self.taken else own

    def pause_bytes(self, taken: int) -> int:
        """Return the bytes on the device between the passes while other code uses `taken` bytes."""
        return self.kept_bytes + self.outside.during(backward=False) + taken

    def peak_of(self, *, backward: bool) -> int:
        """Return the predicted peak of one pass in bytes."""
        if self.needed is not None:
            return self.needed.backward_bytes if backward else self.needed.forward_bytes
        return int(self.timed.load[self.rewritten.backward == backward].max(initial=0))

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the graphs themselves keep on the device between the two passes."""
        captured = self.captured
        if self.needed is not None:
            gradients = int(captured.graph.size[list(captured.incoming)].sum())
            return self.needed.kept_bytes - self.outside.during(backward=True) - gradients
        return bytes_between_passes(self.rewritten, captured.incoming) if self.rewritten.backward.any() else 0

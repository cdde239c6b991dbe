"""Decision about a graph, with the simulated result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solvers.rewriting.judge import Timed
    from solvers.rewriting.rewriting import Rewriting


@dataclass(frozen=True, eq=False)
class Decision:
    """Rewriting of a graph, with the result predicted by `solvers.rewriting.judge`.

    Attributes:
        limit_bytes: the requested limit.
        rewriting: the decisions.
        timed: the rewritten graph, simulated.
        plain_peak_bytes: the peak without rewriting.
        plain_seconds: the seconds of a step without rewriting.
        how: the method that made the decision.
    """

    limit_bytes: int
    rewriting: Rewriting
    timed: Timed
    plain_peak_bytes: int
    plain_seconds: float
    how: str

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device, including those outside the graph."""
        return self.timed.peak_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.timed.seconds

    @property
    def stall_seconds(self) -> float:
        """Seconds waited for copies."""
        return self.timed.stall_seconds

    @property
    def recomputed_seconds(self) -> float:
        """Seconds of recomputed operations."""
        return self.timed.recomputed_seconds

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the host."""
        return self.timed.moved_bytes

    @property
    def returned_bytes(self) -> int:
        """Bytes copied to the device."""
        return self.timed.returned_bytes

    @property
    def host_bytes(self) -> int:
        """Most bytes on the host."""
        return self.timed.host_bytes

    @property
    def cost(self) -> tuple[float, int]:
        """Sort key among decisions that fit: seconds, then bytes moved in both directions."""
        return self.seconds, self.moved_bytes + self.returned_bytes

"""What was decided about a graph, and what it then does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from solvers.rewriting.rewriting import Rewriting
    from solvers.rewriting.timed import Timed


@dataclass(frozen=True, eq=False)
class Decision:
    """What to do with a graph, and what it then does as predicted by `solvers.rewriting.timed`.

    Attributes:
        limit_bytes: what was asked for.
        rewriting: the decisions.
        timed: the rewritten graph, simulated.
        plain_peak_bytes: the peak as nothing is rewritten.
        plain_seconds: the seconds of a step as nothing is rewritten.
        how: what made it.
    """

    limit_bytes: int
    rewriting: Rewriting
    timed: Timed
    plain_peak_bytes: int
    plain_seconds: float
    how: str

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device, what lies outside the graph included."""
        return self.timed.peak_bytes

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timed.seconds

    @property
    def stall_seconds(self) -> float:
        """Waited for copies."""
        return self.timed.stall_seconds

    @property
    def recomputed_seconds(self) -> float:
        """Of what runs again."""
        return self.timed.recomputed_seconds

    @property
    def moved_bytes(self) -> int:
        """Copied to the host; ``returned_bytes``: copied back."""
        return self.timed.moved_bytes

    @property
    def returned_bytes(self) -> int:
        """Copied to the device."""
        return self.timed.returned_bytes

    @property
    def host_bytes(self) -> int:
        """Most bytes on the host."""
        return self.timed.host_bytes

    @property
    def cost(self) -> tuple[float, int]:
        """What makes one better than another that fits as well: seconds, then bytes moved."""
        return self.seconds, self.moved_bytes + self.returned_bytes

"""Records of decisions about a graph: offloads and reloads, recomputed values, and the simulated result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Reload:
    """A reload of a value, with its readers.

    Operation i of a graph of N operations is *run* i; the recompute of operation i is run N + i.

    Attributes:
        consumers: runs that read the value, or a view, from this copy.
        trigger: the run after which the reload begins and takes memory; -1: right before the first consumer.
    """

    consumers: tuple[int, ...]
    trigger: int = -1


@dataclass(frozen=True)
class Offload:
    """Offload of one value with its views, once per step, with all reloads.

    Attributes:
        value: the offloaded value, which is no view.
        reloads: the reloads; other readers read the value itself.
        after: the run after which the copy out begins; -1: the producer of the value.
        release: the run that waits for the copy out, before which the memory is freed; -1: no run waits, and
            the memory is freed after the last read.
    """

    value: int
    reloads: tuple[Reload, ...]
    after: int = -1
    release: int = -1


@dataclass(frozen=True)
class Rewriting:
    """Offload and recompute decisions for the values of one graph; empty by default.

    Attributes:
        offloads: at most one per value.
        recomputed: values that are recomputed directly before their first reader in the backward pass, for
            all its readers, with their views and all other outputs of the same operations.
    """

    offloads: tuple[Offload, ...] = ()
    recomputed: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Simulation:
    """Simulated execution of a graph in order.

    Attributes:
        load: int64[N], bytes on the device during each operation, ``outside_bytes`` included.
        host_load: int64[N], bytes on the host.
        begins: float64[N], seconds at which each operation begins; for a transfer, the copy.
        wait: float64[N], seconds that the program waits for copies before each operation.
        seconds: duration of the step.
        recomputed_seconds: part of this duration spent in recomputed operations.
        moved_bytes: bytes copied to the host.
        returned_bytes: bytes copied to the device.
    """

    load: NDArray[np.int64]
    host_load: NDArray[np.int64]
    begins: NDArray[np.float64]
    wait: NDArray[np.float64]
    seconds: float
    recomputed_seconds: float
    moved_bytes: int
    returned_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device at one time."""
        return int(self.load.max(initial=0))

    @property
    def host_bytes(self) -> int:
        """Most bytes on the host at one time."""
        return int(self.host_load.max(initial=0))

    @property
    def stall_seconds(self) -> float:
        """Seconds waited for copies."""
        return float(self.wait.sum())


@dataclass(frozen=True, eq=False)
class Decision:
    """Rewriting of a graph, with the simulation by `solvers.rewriting.judge`.

    Attributes:
        limit_bytes: the requested limit.
        rewriting: the decisions.
        method: the method that made the decision.
        simulation: the simulated execution of the rewritten graph.
    """

    limit_bytes: int
    rewriting: Rewriting
    method: str
    simulation: Simulation

    @property
    def peak_bytes(self) -> int:
        """Most bytes on the device, including those outside the graph."""
        return self.simulation.peak_bytes

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.simulation.seconds

    @property
    def stall_seconds(self) -> float:
        """Seconds waited for copies."""
        return self.simulation.stall_seconds

    @property
    def host_bytes(self) -> int:
        """Most bytes on the host."""
        return self.simulation.host_bytes

    @property
    def cost(self) -> tuple[float, int]:
        """Sort key of decisions that hold a limit: seconds, then bytes moved in both directions."""
        return self.seconds, self.simulation.moved_bytes + self.simulation.returned_bytes


@dataclass(frozen=True)
class RewritingTunables:
    """Tunables of the search for decisions. Budgets count operations, so that decisions are deterministic.

    Attributes:
        set_work: total operations visited by the search for one limit; some seconds.
        least_sets: least number of evaluated sets of recomputed values.
        most_sets: most evaluated sets.
        price_levels: number of uniform prices between the cheapest and the most expensive operation.
        segments: numbers of forward segments whose crossing values have price 0.
        many_operations: larger graphs search the least limit only at uniform prices, and plan only the best
            set completely.
        scheduled_sets: number of best sets for which the offload planner makes a complete schedule.
        lower_limits: number of lower limits tried if the host is too small for a schedule of the limit.
        estimate_operations: approximate number of groups into which an estimate combines the operations of
            larger steps.
        estimate_least_bytes: size, in bytes, below which buffers stay on the device in an estimate.
        estimate_least_share: `estimate_least_bytes` is at most 1 / `estimate_least_share` of a step's peak.
    """

    set_work: int = 400_000
    least_sets: int = 8
    most_sets: int = 400
    price_levels: int = 8
    segments: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    many_operations: int = 4000
    scheduled_sets: int = 3
    lower_limits: int = 8
    estimate_operations: int = 1024
    estimate_least_bytes: int = 64 << 10
    estimate_least_share: int = 16384


DEFAULTS = RewritingTunables()

"""Record types of the package: memory outside a graph, constraints, decisions and compiled graphs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mempool.torch.compiled.options import TUNABLES
from solvers.rewriting.pass_boundary import bytes_between_passes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from mempool.torch.compiled.costs import StepTimer
    from mempool.torch.compiled.graph import CapturedGraph
    from mempool.torch.compiled.options import Options
    from solvers.rewriting import Graph, Rewriting
    from solvers.rewriting.records import Simulation


@dataclass(frozen=True)
class OutsideBytes:
    """Bytes on the device that the graphs of a step do not contain.

    Attributes:
        always: bytes in use in both passes.
        forward: additional bytes during the forward pass.
        backward: additional bytes during the backward pass.
    """

    always: int = 0
    forward: int = 0
    backward: int = 0

    def during(self, *, backward: bool) -> int:
        """Return all outside bytes during one of the passes."""
        return self.always + (self.backward if backward else self.forward)


NO_OUTSIDE_BYTES = OutsideBytes()


@dataclass(frozen=True)
class Constraints:
    """Constraints on the decision about one step.

    Attributes:
        outside: bytes in use on the device outside the graphs.
        freed_inputs: inputs that are freed after the forward pass unless the step keeps them.
        gradients_stay: true if the gradients given to the backward pass stay alive until the pass ends.
        keep_least: keep as few bytes as possible between the forward and the backward pass.
        keep_bytes: bytes that may be kept even with `keep_least`.
        between_bytes: bytes that other code uses temporarily between the two passes.
        host_limit: host bytes for copies; None: as many as the options allow.
    """

    outside: OutsideBytes = NO_OUTSIDE_BYTES
    freed_inputs: tuple[int, ...] = ()
    gradients_stay: bool = False
    keep_least: bool = False
    keep_bytes: int = 0
    between_bytes: int = 0
    host_limit: int | None = None


UNCONSTRAINED = Constraints()


@dataclass(frozen=True)
class ExternalMemory:
    """Bytes on the device that are outside a graph and not among the graph's inputs.

    Attributes:
        held: bytes that other graphs of the same function hold for saved values and live results, plus
            gradients of earlier steps.
        kept: the part of `held` that other graphs save for their backward passes, saved results included.
        own: bytes held by other runs of the same graph or of another graph compiled from the same code.
        freed_inputs: positions of the graph's inputs without other users after the forward pass.
        parameters: parameters and buffers that the graph does not read.
        gradients: additional gradients in the backward pass, of parameters that later graphs read.
        state: the optimizers' state, including state that PyTorch's own optimizers make in their first step.
        library: the cuBLAS workspace of each of the threads that run passes.
    """

    held: int = 0
    kept: int = 0
    own: int = 0
    freed_inputs: tuple[int, ...] = ()
    parameters: int = 0
    gradients: int = 0
    state: int = 0
    library: int = 0


NO_EXTERNAL_MEMORY = ExternalMemory()


@dataclass(frozen=True, eq=False)
class StepDecision:
    """A decision about a step, with the predictions for that decision.

    Attributes:
        captured: the numbered graph that the decision refers to.
        rewriting: the decision: values to offload and values to recompute.
        rewritten: the graph with the decision applied.
        plain: the simulation of the original graph.
        simulated: the simulation of the rewritten graph.
        outside: bytes in use on the device outside the graph.
        freed_values: inputs and results that are freed after the forward pass unless the step keeps them.
        gradients_stay: true if the gradients given to the backward pass stay alive until the pass ends.
        between_bytes: bytes that other code uses temporarily between the two passes.
        own_bytes: largest size in bytes of a synchronous copy.
        kernel_memory: memory need of the fused kernels; None if operations are not fused.
    """

    captured: CapturedGraph
    rewriting: Rewriting
    rewritten: Graph
    plain: Simulation
    simulated: Simulation
    outside: OutsideBytes
    freed_values: tuple[int, ...] = ()
    gradients_stay: bool = False
    between_bytes: int = 0
    own_bytes: int = 0
    kernel_memory: KernelMemory | None = None

    @property
    def frees_results(self) -> bool:
        """Return true if the decision assumes that the results are freed when the backward pass begins."""
        return not set(self.freed_values).isdisjoint(self.captured.results)

    @property
    def lasting(self) -> NDArray[np.bool_]:
        """Return the mask of the values whose memory counts as allocated for the whole step: bool[M]."""
        graph = self.captured.graph
        result: NDArray[np.bool_] = graph.lasting & ~np.isin(graph.base, self.freed_values)
        return result

    @property
    def changes_graph(self) -> bool:
        """Return true if any value is offloaded or recomputed."""
        return bool(self.rewriting.offloads or self.rewriting.recomputed)

    @property
    def peak_bytes(self) -> int:
        """Return the predicted peak on the device in bytes."""
        own = self.simulated.peak_bytes if self.kernel_memory is None else self.kernel_memory.peak_bytes
        return max(own, self.pause_bytes(self.between_bytes)) if self.between_bytes else own

    def pause_bytes(self, between_bytes: int) -> int:
        """Return the bytes on the device between the passes while other code uses `between_bytes` bytes."""
        return self.kept_bytes + self.outside.during(backward=False) + between_bytes

    def peak_of(self, *, backward: bool) -> int:
        """Return the predicted peak of one pass in bytes."""
        if self.kernel_memory is not None:
            return self.kernel_memory.backward_bytes if backward else self.kernel_memory.forward_bytes
        return int(self.simulated.load[self.rewritten.backward == backward].max(initial=0))

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the graphs themselves keep on the device between the two passes."""
        captured = self.captured
        if self.kernel_memory is not None:
            gradients = int(captured.graph.size[list(captured.incoming_gradients)].sum())
            return self.kernel_memory.kept_bytes - self.outside.during(backward=True) - gradients
        return (
            bytes_between_passes(self.rewritten, captured.incoming_gradients)
            if self.rewritten.backward.any()
            else 0
        )


@dataclass(frozen=True)
class HostPlacement:
    """Offsets of copies in the host arena.

    Attributes:
        at: offset in bytes by value; values that are not offloaded have no entry.
        size: size of all copies together in bytes, in whole pages.
    """

    at: Mapping[int, int] = field(default_factory=dict)
    size: int = 0

    def shift(self, begin: int) -> HostPlacement:
        """Return the placement shifted by `begin` bytes."""
        return HostPlacement({value: begin + at for value, at in self.at.items()}, self.size)


@dataclass(frozen=True)
class KernelMemory:
    """Bytes on the device for a step with fused operations.

    Attributes:
        forward_bytes: peak of the forward pass.
        backward_bytes: peak of the backward pass.
        kept_bytes: bytes when the backward pass begins, with outside bytes and incoming gradients.
        kernel: the operations of the kernel at the peak.
        small: true if kernels are kept small.
    """

    forward_bytes: int
    backward_bytes: int
    kept_bytes: int
    kernel: str
    small: bool

    @property
    def peak_bytes(self) -> int:
        """Return the peak of both passes."""
        return max(self.forward_bytes, self.backward_bytes)


#: Bytes of tickets in flight, for each value that may be offloaded.
TICKET_BYTES = 16


@dataclass(frozen=True, eq=False)
class CompiledGraph:
    """One compiled graph.

    Attributes:
        number: number of the graph, in the order of the first runs within a step.
        more: true if the function continues in another graph, as after a graph break.
        options: the options of the backend.
        decision: the decision about the graph.
        timer: the times of the two graphs.
        external: the memory assumed to be in use outside the graph.
        host_end: end of the planned places of the graph's copies, in bytes from the start of the host arena.
        bytes_kept_before: bytes that earlier graphs were predicted to keep when this graph was compiled.
        kept_bytes_at: returns the bytes that the graph would keep between the passes within another limit.
            None: the number does not change, e.g. after the function's last graph, or another function, was
            compiled.
        least_limit_bytes: least feasible limit if operations are not fused, which takes no compilation.
    """

    number: int
    more: bool
    options: Options
    decision: StepDecision
    timer: StepTimer
    external: ExternalMemory = NO_EXTERNAL_MEMORY
    host_end: int = 0
    bytes_kept_before: int = 0
    kept_bytes_at: Callable[[int], int] | None = None
    least_limit_bytes: int | None = None

    def kept_within(self, limit: int, external: int) -> int:
        """Return the bytes that the graph would keep between the passes within another limit.

        Earlier graphs are assumed to keep `external` bytes.
        """
        if self.kept_bytes_at is None:
            return self.decision.kept_bytes
        return self.kept_bytes_at(limit + self.bytes_kept_before - external)

    @property
    def tolerated_limit(self) -> int:
        """Return the limit plus the tolerated excess."""
        return int((self.options.limit or 0) * (1 + TUNABLES.ignored_excess))

    def needed_bytes(self, outside_bytes: int, *, backward: bool) -> int:
        """Return the peak of a pass if `outside_bytes` are in use outside the graph."""
        assumed = self.decision.outside.during(backward=backward)
        return self.decision.peak_of(backward=backward) + outside_bytes - assumed


@dataclass(frozen=True)
class RunStart:
    """Memory outside a run of a graph when the run begins, in bytes.

    Attributes:
        others: bytes held by other graphs, and gradients.
        parameters: parameters and buffers that the graph does not read.
        own: bytes held by other runs of the same graph, without their saved values.
        waiting: bytes of the values that these runs saved for their backward runs.
        runs: number of these runs with saved values.
        kept: bytes that each run was predicted to keep.
    """

    others: int = 0
    parameters: int = 0
    own: int = 0
    waiting: int = 0
    runs: int = 0
    kept: int = 0

    def bytes(self, kept: int | None = None) -> int:
        """Return the total bytes.

        `kept`: assumed bytes that each run keeps, instead of the observed bytes.
        """
        more = 0 if kept is None else self.runs * (kept - self.kept)
        return self.others + self.parameters + self.own + max(self.waiting + more, 0)


NO_RUN_START = RunStart()


@dataclass
class Observations:
    """Memory observed outside the runs of a graph.

    Attributes:
        gradients_stay: true if other code holds the gradients given to the backward pass until the pass ends.
        between: most bytes that other code used temporarily between the two passes.
        state: most bytes of the optimizers' state.
    """

    gradients_stay: bool = False
    between: int = 0
    state: int = 0
    _most: dict[tuple[bool, int], RunStart] = field(default_factory=dict)

    def note(self, moment: RunStart, *, backward: bool) -> None:
        """Record a starting run; keep only the largest moment for each number of other runs."""
        key = backward, moment.runs
        if moment.bytes() > self._most.get(key, NO_RUN_START).bytes():
            self._most[key] = moment

    @property
    def runs(self) -> int:
        """Return the largest number of other runs at the same time."""
        return max((moment.runs for moment in self._most.values()), default=0)

    @property
    def kept(self) -> int:
        """Return the most bytes that a run was predicted to keep."""
        return max((moment.kept for moment in self._most.values()), default=0)

    @property
    def is_empty(self) -> bool:
        """Return true if no run was observed with memory outside."""
        return not self._most

    def largest_moment(self, kept: int | None = None, *, backward: bool) -> RunStart:
        """Return the moment of a pass with the most outside bytes, if each run keeps `kept` bytes."""
        found = (moment for (in_backward, _), moment in self._most.items() if in_backward == backward)
        return max(found, key=lambda moment: moment.bytes(kept), default=NO_RUN_START)

    def bytes(self, kept: int | None = None, *, backward: bool) -> int:
        """Return the outside bytes of a pass's largest moment, if each run keeps `kept` bytes."""
        return self.largest_moment(kept, backward=backward).bytes(kept)


NO_OBSERVATIONS = Observations()


class Extreme(enum.Enum):
    """Decisions that can be requested independent of the limit."""

    NOTHING = enum.auto()  # move values only to keep few bytes between the passes
    LEAST = enum.auto()  # reach the lowest peak, counted by operations
    ALL = enum.auto()  # move all values

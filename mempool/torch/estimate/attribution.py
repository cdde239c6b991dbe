"""Peak attribution: bytes alive at the peak by category, by module, and peaks by phase."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from traces import EventType
from traces.buffers import buffers_of
from traces.columns import distinct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from traces import Trace

#: Roles of a buffer in a training program, in the order of reports.
CATEGORIES = (
    "parameters",
    "module_buffers",
    "gradients",
    "optimizer_state",
    "inputs",
    "key_value_cache",
    "activations",
    "temporaries",
)
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class ModuleShare:
    """Bytes of one module at the peak, without its children's.

    Attributes:
        module: path from the class of the model on, such as "GPT.layers.0"; "" for buffers of no module.
        bytes: of the module's parameters, and of buffers made while the module ran.
        by_class_bytes: ``bytes`` by category.
    """

    module: str
    bytes: int
    by_class_bytes: dict[str, int] = field(default_factory=dict)


def rounded(trace: Trace, alignment: int) -> Trace:
    """Return the trace with sizes rounded up to a multiple, as an allocator rounds them."""
    return dataclasses.replace(trace, size=-(-trace.size // alignment) * alignment)


def steps_of(trace: Trace) -> NDArray[np.int64]:
    """Return the rows of the marks that end steps, int64[k]."""
    if "step" not in trace.names:
        return np.empty(0, np.int64)
    return np.flatnonzero((trace.kind == EventType.MARK) & (trace.operation == trace.names.index("step")))


@dataclass(frozen=True, eq=False)
class PeakAttribution:
    """The event with the highest load in the steps after the first.

    Attributes:
        trace: the trace.
        event: row of the event.
        bytes: alive after the event.
        first_step_bytes: peak load of the first step.
        by_phase_bytes: peak load of each phase.
    """

    trace: Trace
    event: int
    bytes: int
    first_step_bytes: int
    by_phase_bytes: dict[str, int]

    @classmethod
    def of(cls, trace: Trace, *, whole: bool = False) -> PeakAttribution:
        """Find the peak of a trace with marks of steps.

        The first of several steps is left out unless ``whole`` is true.
        """
        load, steps = trace.load(), steps_of(trace)
        begin = int(steps[0]) if len(steps) > 1 and not whole else 0
        event = begin + int(load[begin:].argmax())
        phases = _phases(trace)
        by_phase = {
            PHASES[phase]: int(load[begin:][phases[begin:] == phase].max())
            for phase in range(len(PHASES))
            if (phases[begin:] == phase).any()
        }
        first = int(load[: steps[0]].max(initial=0)) if len(steps) else int(load[event])
        return cls(trace, event, int(load[event]), first, by_phase)

    @property
    def operation(self) -> str:
        """Return the operation that ran at the peak."""
        return self._name(int(self.trace.operation[self.event]))

    @property
    def module(self) -> str:
        """Return the module that ran at the peak."""
        return self._name(int(self.trace.module[self.event]))

    @property
    def phase(self) -> str:
        """Return the phase of the peak; "" before the first phase."""
        phase = int(_phases(self.trace)[self.event])
        return PHASES[phase] if phase >= 0 else ""

    def by_class_bytes(self) -> dict[str, int]:
        """Return the bytes alive by category; the sum is ``bytes``."""
        return self._by_class(self._alive())

    def by_module(self) -> list[ModuleShare]:
        """Return the bytes alive by module, largest first; the sum is ``bytes``."""
        alive = self._alive()
        modules = self.trace.module[alive]
        shares = []
        for index in distinct(modules).tolist():
            rows = alive[modules == index]
            held = self._by_class(rows)
            shares.append(ModuleShare(self._name(index), int(self.trace.size[rows].sum()), held))
        return _sorted(shares)

    def _alive(self) -> NDArray[np.int64]:
        """Return the alloc rows of the buffers alive at the peak, int64[m]."""
        buffers = buffers_of(self.trace)
        alive = (buffers.start <= self.event) & (self.event < buffers.end)
        rows: NDArray[np.int64] = buffers.start[alive & (buffers.size > 0)]
        return rows

    def _by_class(self, rows: NDArray[np.int64]) -> dict[str, int]:
        held = dict.fromkeys(CATEGORIES, 0)
        for index in distinct(self.trace.category[rows]).tolist():
            name = self._name(index) or CATEGORIES[-1]
            held[name] = held.get(name, 0) + int(
                self.trace.size[rows[self.trace.category[rows] == index]].sum()
            )
        return {name: size for name, size in held.items() if size}

    def _name(self, index: int) -> str:
        return self.trace.names[index] if index >= 0 else ""


def merged(shares: Iterable[ModuleShare], depth: int) -> list[ModuleShare]:
    """Return shares in which modules below a depth count as their ancestor at this depth, largest first."""
    found: dict[str, ModuleShare] = {}
    for share in shares:
        path = ".".join(share.module.split(".")[: depth + 1])
        before = found.get(path, ModuleShare(path, 0))
        held = dict(before.by_class_bytes)
        for name, size in share.by_class_bytes.items():
            held[name] = held.get(name, 0) + size
        found[path] = ModuleShare(path, before.bytes + share.bytes, held)
    return _sorted(found.values())


def _sorted(shares: Iterable[ModuleShare]) -> list[ModuleShare]:
    return sorted(shares, key=lambda share: (-share.bytes, share.module))


def _phases(trace: Trace) -> NDArray[np.int64]:
    """Return each event's index in `PHASES`, or -1 before the first phase; step marks end no phase."""
    number = [PHASES.index(name) if name in PHASES else -1 for name in (*trace.names, "")]
    phase = np.where(trace.kind == EventType.MARK, np.array(number)[trace.operation], -1)
    marked = np.flatnonzero(phase >= 0)
    last = np.searchsorted(marked, np.arange(len(trace)), side="right") - 1
    return np.where(last >= 0, np.append(phase[marked], -1)[last], -1)

"""Peak attribution: bytes alive at the peak by category, by module, and peaks by phase."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mempool.analysis.peak import PHASES, Peak, at_peak, phases, shares
from traces import EventType

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


@dataclass(frozen=True)
class ModuleShare:
    """Bytes of one module at the peak, without its children.

    Attributes:
        module: path that begins with the model's class, such as "GPT.layers.0"; "" for buffers without
            module.
        bytes: bytes of the module's parameters, and of buffers made while the module ran.
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
    """The peak load in the steps after the first.

    Attributes:
        trace: the trace.
        peak: the buffers alive at the peak.
        phase: phase of each event, as of `mempool.analysis.peak.phases`.
        first_step_bytes: peak load of the first step.
        by_phase_bytes: peak load of each phase.
    """

    trace: Trace
    peak: Peak
    phase: NDArray[np.int32]
    first_step_bytes: int
    by_phase_bytes: dict[str, int]

    @classmethod
    def of(cls, trace: Trace, *, whole: bool = False) -> PeakAttribution:
        """Find the peak of a trace with marks of steps.

        The first of several steps is excluded unless ``whole`` is true.
        """
        load, steps, phase = trace.load(), steps_of(trace), phases(trace)
        first = int(steps[0]) if len(steps) > 1 and not whole else 0
        peak = at_peak(trace, first=first)
        by_phase = {
            name: int(load[first:][rows].max())
            for name in PHASES
            if name in trace.names and (rows := phase[first:] == trace.names.index(name)).any()
        }
        first_step_bytes = int(load[: steps[0]].max(initial=0)) if len(steps) else peak.bytes
        return cls(trace, peak, phase, first_step_bytes, by_phase)

    def name(self, column: NDArray[np.int32]) -> str:
        """Return the name of the peak's event in a column, such as ``trace.module``; "" without one."""
        number = int(column[self.peak.event])
        return self.trace.names[number] if number >= 0 else ""

    def by_class_bytes(self) -> dict[str, int]:
        """Return the bytes alive by category, in the order of `CATEGORIES`; the sum is ``peak.bytes``."""
        return self._by_class(self.peak)

    def by_module(self) -> list[ModuleShare]:
        """Return the bytes alive by module, largest first; the sum is ``peak.bytes``."""
        peak, modules = self.peak, self.trace.module[self.peak.alloc]
        found = []
        for number in np.unique(modules).tolist():
            rows = modules == number
            own = dataclasses.replace(peak, alloc=peak.alloc[rows], size=peak.size[rows])
            name = self.trace.names[number] if number >= 0 else ""
            found.append(ModuleShare(name, int(own.size.sum()), self._by_class(own)))
        return _sorted(found)

    def _by_class(self, peak: Peak) -> dict[str, int]:
        held = Counter(dict.fromkeys(CATEGORIES, 0))
        for share in shares(self.trace, peak, self.trace.category, len(self.trace.names) + 1):
            held[share.name or CATEGORIES[-1]] += share.bytes
        return {name: size for name, size in held.items() if size}


def merged(shares: Iterable[ModuleShare], depth: int) -> list[ModuleShare]:
    """Merge modules below a depth into their ancestor at this depth; return shares, the largest first."""
    found: dict[str, ModuleShare] = {}
    for share in shares:
        path = ".".join(share.module.split(".")[: depth + 1])
        before = found.get(path, ModuleShare(path, 0))
        held = Counter(before.by_class_bytes) + Counter(share.by_class_bytes)
        found[path] = ModuleShare(path, before.bytes + share.bytes, dict(held))
    return _sorted(found.values())


def _sorted(shares: Iterable[ModuleShare]) -> list[ModuleShare]:
    return sorted(shares, key=lambda share: (-share.bytes, share.module))

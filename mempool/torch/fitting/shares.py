"""Who holds how much when most is alive: by category, by module, in each phase."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from traces import Kind
from traces.buffers import buffers_of
from traces.columns import distinct

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces import Trace

#: What a buffer can be to a training program, in the order in which it is told.
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
    """What belongs to one module at the peak, its children's not included.

    Attributes:
        module: its path, from the class of the model on, as "GPT.layers.0"; "" where there is none.
        bytes: of its parameters, and of what was made while it ran.
        by_class_bytes: of these, each category's.
    """

    module: str
    bytes: int
    by_class_bytes: dict[str, int] = field(default_factory=dict)


def rounded(trace: Trace, alignment: int) -> Trace:
    """The trace with sizes rounded up to a multiple, as an allocator rounds them."""
    return dataclasses.replace(trace, size=-(-trace.size // alignment) * alignment)


def steps_of(trace: Trace) -> NDArray[np.int64]:
    """Rows of the marks that end steps, int64[k]."""
    if "step" not in trace.names:
        return np.empty(0, np.int64)
    return np.flatnonzero((trace.kind == Kind.MARK) & (trace.operation == trace.names.index("step")))


@dataclass(frozen=True, eq=False)
class AtPeak:
    """The most loaded event of the steps after the first.

    Attributes:
        trace: what it is of.
        event: its row.
        bytes: alive after it.
        first_step_bytes: most that is alive in the first step.
        by_phase_bytes: most that is alive in each phase.
    """

    trace: Trace
    event: int
    bytes: int
    first_step_bytes: int
    by_phase_bytes: dict[str, int]

    @classmethod
    def of(cls, trace: Trace) -> AtPeak:
        """Of a trace with marks of steps; with one step, that is the one."""
        load, steps = trace.load(), steps_of(trace)
        begin = int(steps[0]) if len(steps) > 1 else 0
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
        """The operation that ran."""
        return self._name(int(self.trace.operation[self.event]))

    @property
    def module(self) -> str:
        """The module that ran."""
        return self._name(int(self.trace.module[self.event]))

    @property
    def phase(self) -> str:
        """Which phase it was."""
        phase = int(_phases(self.trace)[self.event])
        return PHASES[phase] if phase >= 0 else ""

    def by_class_bytes(self) -> dict[str, int]:
        """Bytes alive of each category; they add up to ``bytes``."""
        return self._by_class(self._alive())

    def by_module(self, depth: int | None = None) -> list[ModuleShare]:
        """Bytes alive of each module, largest first; they add up to ``bytes``.

        Args:
            depth: modules further below the model count as the one above them; None for all by themselves.
        """
        alive = self._alive()
        paths = np.array([_cut(self._name(int(m)), depth) for m in self.trace.module[alive]], object)
        shares = [
            ModuleShare(path, int(self.trace.size[rows].sum()), self._by_class(rows))
            for path in dict.fromkeys(paths.tolist())
            if len(rows := alive[paths == path])
        ]
        return sorted(shares, key=lambda share: (-share.bytes, share.module))

    def _alive(self) -> NDArray[np.int64]:
        """Rows of the allocs of who is alive, int64[m]."""
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


def _cut(path: str, depth: int | None) -> str:
    return path if depth is None else ".".join(path.split(".")[: depth + 1])


def _phases(trace: Trace) -> NDArray[np.int64]:
    """Of each event the index of its phase in `PHASES`, or -1 before the first; steps end none."""
    number = [PHASES.index(name) if name in PHASES else -1 for name in (*trace.names, "")]
    phase = np.where(trace.kind == Kind.MARK, np.array(number)[trace.operation], -1)
    told = np.flatnonzero(phase >= 0)
    last = np.searchsorted(told, np.arange(len(trace)), side="right") - 1
    return np.where(last >= 0, np.append(phase[told], -1)[last], -1)

"""Windows of a trace: the bounds of iterations, and sets of iterations with equal sequences."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from traces._core import (
    LEAST_EVIDENCE_BUT_RARE,
    LEAST_KEPT,
    LEAST_RARE,
    LEAST_REPEATS_BUT_RARE,
    MOST_RARE,
    sequence_with_most_bytes,
)
from traces.columns import distinct
from traces.iterations.cycles import EVIDENCE, Cycle, Evidence, find_cycle
from traces.iterations.envelope import Envelope, envelopes
from traces.trace import AUTOMATIC_MARK, EventType

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from numpy.typing import NDArray

    from traces.trace import Trace


#: Numbers of iterations of a variant that are examined at the beginning and at the end of an unfinished
#: trace: the first iterations show the warm-up, the last the present behavior.
FIRST_WINDOWS, LAST_WINDOWS = 16, 1024
WITHOUT_RARE = Evidence(LEAST_EVIDENCE_BUT_RARE, LEAST_REPEATS_BUT_RARE)

#: An odd number without a regular bit pattern: the golden ratio's fraction in 64 bits (Knuth, TAOCP, section
#: 6.4).
_BASE = 0x9E3779B97F4A7C15

#: Marks of recorders within an iteration of training.
_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True, eq=False)
class Windows:
    """Allocations of a trace above the small size, one row each, divided into iterations.

    Attributes:
        event: int64[m], the row of the trace.
        sequence: int32[m].
        stream: int64[m].
        size: int64[m], bytes; in an envelope's windows the largest size among these windows.
        freed_before: int64[m], number of rows before the free of each row (m: after the last row); -1 if not
            freed.
        shared: bool[m], used by a stream other than the allocating one.
        marks: int64[k], number of rows before each mark.
        count: number of windows in the trace.
        bounds: int64[w, 2], first row and end of each examined window.
        alike: windows with equal sequences, latest last; at least two, in an unfinished trace not all of
            them.
        groups: group of each repeating sequence: 0 for all sequences with a constant common order, then one
            group for each sequence whose order is constant only within itself. Varying sequences are missing.
        separate: rows of those missing sequences that have separate iterations, such as unsynchronised
            threads: int64[iteration, position].
        least: int64[m], only for an envelope: the least bytes expected.
    """

    event: NDArray[np.int64]
    sequence: NDArray[np.int32]
    stream: NDArray[np.int64]
    size: NDArray[np.int64]
    freed_before: NDArray[np.int64]
    shared: NDArray[np.bool_]
    marks: NDArray[np.int64]
    count: int
    bounds: NDArray[np.int64]
    alike: tuple[int, ...]
    groups: dict[int, int]
    separate: dict[int, NDArray[np.int64]]
    least: NDArray[np.int64] | None = None

    def since(self) -> dict[int, int]:
        """Return for each sequence the number of rows since the sequence's last iteration began."""
        begin = int(self.bounds[self.alike[-1], 0])
        return {
            s: int(
                (self.sequence[int(self.separate[s][-1, 0]) if s in self.separate else begin :] == s).sum()
            )
            for s in distinct(self.sequence).tolist()
        }


def find_windows(
    trace: Trace,
    small_bytes: int,
    *,
    anywhere: bool = False,
    enveloped: Collection[int] | None = None,
    automatic_marks: bool = False,
) -> list[Windows]:
    """Divide a trace into iterations, and group them by recurring variant, the latest first.

    Args:
        trace: events in host order.
        small_bytes: allocations up to this size are left out.
        anywhere: without marks, look for the longest run of iterations instead of the run at the trace's end.
        enveloped: find envelopes of marked iterations whose many variants differ in sizes only
            (`traces.iterations.envelope`). Two iterations with one of these allocation counts suffice for an
            envelope.
            None: find no envelopes.
        automatic_marks: marks of recorders, named `AUTOMATIC_MARK`, count as marks.

    Raises:
        TraceError: the trace contradicts itself.
    """
    event = np.flatnonzero((trace.kind == EventType.ALLOC) & (trace.size > small_bytes))
    marks = iteration_marks(trace, automatic_marks=automatic_marks)
    windows = _windows_of(trace, event, marks, EVIDENCE, anywhere=anywhere, enveloped=enveloped)
    if windows:
        return windows
    for steady in _without_rare(event, trace.size):
        if windows := _windows_of(trace, steady, marks, WITHOUT_RARE, anywhere=anywhere, enveloped=enveloped):
            break
    return windows


def iteration_marks(trace: Trace, *, automatic_marks: bool = False) -> NDArray[np.int64]:
    """Return the rows of the marks that separate iterations, int64[k].

    Marks of recorders, named `AUTOMATIC_MARK`, count with ``automatic_marks`` only.
    """
    within = _PHASES if automatic_marks else (*_PHASES, AUTOMATIC_MARK)
    counts = np.array([*(name not in within for name in trace.names), True])  # the last entry: no name
    marks = np.flatnonzero((trace.kind == EventType.MARK) & (trace.category < 0))
    rows: NDArray[np.int64] = marks[counts[trace.operation[marks]]]
    return rows


def _without_rare(event: NDArray[np.int64], size: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the allocations without rare sizes, for rising thresholds, while most allocations remain.

    Data-dependent sizes (a mask, the result of unique) hide the iteration around them.
    """
    if len(event) < WITHOUT_RARE.values:
        return
    _, kind, count = np.unique(size[event], return_inverse=True, return_counts=True)
    kept, rare = len(event), LEAST_RARE // 2
    while (rare := 2 * rare) <= MOST_RARE:
        steady = event[count[kind] >= rare]
        if len(steady) < LEAST_KEPT * len(event):
            return
        if len(steady) < kept:
            kept = len(steady)
            yield steady


def _windows_of(
    trace: Trace,
    event: NDArray[np.int64],
    mark_events: NDArray[np.int64],
    evidence: Evidence,
    *,
    anywhere: bool,
    enveloped: Collection[int] | None,
) -> list[Windows]:
    """Return the windows of these allocations."""
    if len(event) == 0:
        return []
    births = trace.births
    row_of = np.full(len(trace), -1, np.int64)
    row_of[event] = np.arange(len(event))
    freed_before = np.full(len(event), -1, np.int64)
    frees = np.flatnonzero(trace.kind == EventType.FREE)
    frees = frees[row_of[births[frees]] >= 0]
    freed_before[row_of[births[frees]]] = np.searchsorted(event, frees)

    shared = np.zeros(len(event), np.bool_)
    uses = np.flatnonzero((trace.kind == EventType.READ) | (trace.kind == EventType.WRITE))
    uses = uses[trace.stream[uses] != trace.stream[births[uses]]]
    shared[row_of[births[uses]][row_of[births[uses]] >= 0]] = True

    sequence, size = trace.thread[event], trace.size[event]
    begins = np.array([e for e in mark_events if _mark_name(trace, int(e)) != "end"], np.int64)
    marks = np.searchsorted(event, begins)
    if len(mark_events):
        bounds = _marked(trace, mark_events, event)
    else:
        main = sequence_with_most_bytes(sequence[len(size) // 2 :], size[len(size) // 2 :])
        rows = np.flatnonzero(sequence == main)
        bounds = _detected(find_cycle(rows, size, freed_before, anywhere=anywhere, evidence=evidence))
    stream = trace.stream[event]
    if len(bounds) < 2 or bounds[0, 0] == bounds[-1, 1]:
        return []
    if len(mark_events):
        marked = slice(bounds[0, 0], bounds[-1, 1])
        main = sequence_with_most_bytes(sequence[marked], size[marked])
    window_count = len(bounds)
    if not anywhere:
        bounds = bounds[first_and_last_of_each_variant(sequence == main, size, bounds)]
    joined = []
    if enveloped is not None and len(mark_events):
        joined = envelopes(sequence, size, freed_before, bounds, main, enveloped)
    all_windows = []
    for alike, sizes, least in _variants(_alike(sequence, size, bounds, main), size, joined):
        groups = _groups(sequence, sizes, bounds, alike, main)
        windows = Windows(
            event,
            sequence,
            stream,
            sizes,
            freed_before,
            shared,
            marks,
            window_count,
            bounds,
            alike,
            groups,
            separate={},
            least=least,
        )
        if len(mark_events) == 0:
            windows = dataclasses.replace(windows, separate=_separate_cycles(windows, anywhere=anywhere))
        all_windows.append(windows)
    return all_windows


def _variants(
    alike: list[tuple[int, ...]], size: NDArray[np.int64], joined: list[Envelope]
) -> list[tuple[tuple[int, ...], NDArray[np.int64], NDArray[np.int64] | None]]:
    """Return (windows, sizes, least sizes of an envelope) of each variant, the latest first."""
    in_one = {window for envelope in joined for window in envelope.alike}
    variants: list[tuple[tuple[int, ...], NDArray[np.int64], NDArray[np.int64] | None]] = [
        (same, size, None) for same in alike if same[-1] not in in_one
    ]
    variants += [(envelope.alike, envelope.size, envelope.least) for envelope in joined]
    return sorted(variants, key=lambda variant: -variant[0][-1])


def first_and_last_of_each_variant(
    of_main: NDArray[np.bool_], size: NDArray[np.int64], bounds: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the first and the last windows of each variant, in order.

    Windows of one variant have the same sizes of the main sequence in the same order, compared by their sum
    and by their polynomial fingerprint modulo 2**64 (Karp and Rabin, Efficient randomized pattern-matching
    algorithms, 1987).
    """
    if len(bounds) <= FIRST_WINDOWS + LAST_WINDOWS:
        return np.arange(len(bounds))
    main = np.where(of_main, size, 0).astype(np.uint64)
    before = np.append(0, np.cumsum(of_main))
    power, inverse = (_powers(base, before[-1]) for base in (_BASE, pow(_BASE, -1, 2**64)))
    plain, weighted = (np.append(np.uint64(0), np.cumsum(x)) for x in (main, main * power[before[1:]]))
    first, end = bounds.T
    kind = np.stack([plain[end] - plain[first], (weighted[end] - weighted[first]) * inverse[before[first]]])
    order = np.lexsort([np.arange(len(bounds)), *kind])
    begins = np.flatnonzero(np.append(True, (np.diff(kind[:, order], axis=1) != 0).any(axis=0)))
    count = np.diff(np.append(begins, len(bounds)))
    nth = np.arange(len(bounds)) - np.repeat(begins, count)
    left = np.repeat(count, count) - nth
    chosen: NDArray[np.int64] = np.sort(order[(nth < FIRST_WINDOWS) | (left <= LAST_WINDOWS)])
    return chosen


def _powers(base: int, most: int) -> NDArray[np.uint64]:
    """Return the powers of `base` from 0 to `most`, modulo 2**64, uint64[most + 1]."""
    return np.append(np.uint64(1), np.cumprod(np.full(most, base, np.uint64)))


def _mark_name(trace: Trace, event: int) -> str:
    name = int(trace.operation[event])
    return trace.names[name] if name >= 0 else "step"


def _marked(trace: Trace, marks: NDArray[np.int64], event: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the windows between successive marks, or from "begin" to "end" marks."""
    bounds = []
    for here, there in itertools.pairwise(marks):
        if _mark_name(trace, int(here)) != "end":
            bounds.append(np.searchsorted(event, [here, there]))
    return np.array(bounds, np.int64).reshape(-1, 2)


def _detected(cycle: Cycle | None) -> NDArray[np.int64]:
    """Return the windows between successive beginnings of a cycle's iterations."""
    if cycle is None:
        return np.zeros((0, 2), np.int64)
    return np.stack([cycle.starts[:-1], cycle.starts[1:]], axis=1)


def _separate_cycles(windows: Windows, *, anywhere: bool) -> dict[int, NDArray[np.int64]]:
    """Find the separate sequences: see `Windows.separate`; ignore sequences without recent allocations."""
    w, cycles = windows, {}
    for s in distinct(w.sequence[len(w.sequence) // 2 :]).tolist():
        if s in w.groups:
            continue
        rows = np.flatnonzero(w.sequence == s)
        if (cycle := find_cycle(rows, w.size, w.freed_before, anywhere=anywhere)) is not None:
            cycles[s] = cycle.whole
    return cycles


def _alike(
    sequence: NDArray[np.int32], size: NDArray[np.int64], bounds: NDArray[np.int64], main: int
) -> list[tuple[int, ...]]:
    """Return sets of windows with equal main sequences, the set with the latest window first."""
    twins: dict[bytes, list[int]] = {}
    for window, (first, end) in enumerate(bounds):
        if key := size[first:end][sequence[first:end] == main].tobytes():
            twins.setdefault(key, []).append(window)
    sets = [tuple(same) for same in twins.values() if len(same) >= 2]
    return sorted(sets, key=lambda same: -same[-1])


def _groups(
    sequence: NDArray[np.int32],
    size: NDArray[np.int64],
    bounds: NDArray[np.int64],
    alike: tuple[int, ...],
    main: int,
) -> dict[int, int]:
    """Return the group of each repeating sequence: see `Windows.groups`."""
    last = slice(*bounds[alike[-1]])
    present = distinct(sequence[last])
    weight = {int(s): float(size[last][sequence[last] == s].sum()) for s in present}
    others = sorted((s for s in weight if s != main), key=lambda s: (-weight[s], s))
    windows = [slice(*bounds[w]) for w in alike]

    def same_in_all(chosen: list[int]) -> bool:
        keys = set()
        for window in windows:
            keep = np.isin(sequence[window], chosen)
            keys.add((sequence[window][keep].tobytes(), size[window][keep].tobytes()))
        return len(keys) == 1

    together, groups = [main], {main: 0}
    for s in others:
        if not same_in_all([s]):
            continue
        if same_in_all([*together, s]):
            together.append(s)
            groups[s] = 0
        else:
            groups[s] = max(groups.values()) + 1
    return groups

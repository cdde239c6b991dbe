"""Remedies that would save memory, their largest savings, and the simulations for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool.analysis.peak import LEAST_ABSENCE
from mempool.simulate import simulate
from mempool.units import binary
from solvers.simulators.pytorch import recorded_settings
from traces import EventType, TraceError
from traces.completeness import History
from traces.transforms import refused_as_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.analysis.peak import Absences, Peak
    from solvers.simulators import Simulation
    from traces import Trace
    from traces.completeness import Completeness


@dataclass(frozen=True)
class Remedy:
    """A remedy and its largest saving.

    Attributes:
        name: "pool", "setting" (of the recorded allocator), "fragmentation", "free_earlier" or "swap".
        saves_bytes: largest saving, of the reserved bytes or of the peak load.
        how: the action, in a sentence.
    """

    name: str
    saves_bytes: int
    how: str


def remedies(
    peak: Peak,
    idle: Absences | None,
    unused: int | None,
    iteration_events: int,
    simulated: Sequence[Remedy] = (),
) -> list[Remedy]:
    """Return the remedies with a saving, the largest saving first.

    Args:
        peak: the buffers alive at the peak load.
        idle: absences at the peak, if accesses were recorded.
        unused: peak of the reserved bytes minus peak load, if the recording has the whole history and there
            are no simulations; else None.
        iteration_events: length of an iteration, or of the whole trace without iterations.
        simulated: savings of the pool and of settings.
    """
    found = list(simulated)
    if unused is not None:
        how = "reserved beyond the peak load: see `mempool compare` for pools and allocators that need less"
        found.append(Remedy("fragmentation", unused, how))
    if idle is not None:
        late, away = idle.late(peak), idle.used_again & idle.away(iteration_events)
        found += [
            Remedy(
                "free_earlier",
                int(peak.size[late].sum()),
                "drop references sooner: these buffers are alive at the peak, but were last used before it",
            ),
            Remedy(
                "swap",
                int(peak.size[away].sum()),
                f"swap or recompute: these are not touched for {LEAST_ABSENCE:.0%} of an iteration or more",
            ),
        ]
    return sorted(
        (remedy for remedy in found if remedy.saves_bytes > 0), key=lambda remedy: -remedy.saves_bytes
    )


#: Most events of a simulated trace, since longer traces take seconds.
MOST_EVENTS = 2_000_000

#: The pool of PyTorch's programs on CUDA, with growing memory.
POOL = "planned_growing"
#: Settings to simulate: name, value (sizes in MiB), and allocator with this setting.
SETTINGS = (
    ("expandable_segments", True, "pytorch_expandable"),
    *(("max_split_size_mb", size, "pytorch") for size in (64, 128, 256)),
    *(("large_segment_size_mb", size, "pytorch") for size in (40, 100, 200)),
)


@dataclass(frozen=True)
class ReservedEstimates:
    """Simulations of a recorded device.

    Attributes:
        pool_bytes: most bytes that `mempool run` would reserve; None where that cannot be simulated.
        plan_bytes: the arena of a plan of the whole recording, a lower bound for pools that learn.
        refused: (pool_bytes, plan_bytes) including refused requests; None without refused requests.
        remedies: simulated changes, with their saving compared to the recording.
    """

    pool_bytes: int | None
    plan_bytes: int | None
    refused: tuple[int | None, int | None] | None
    remedies: list[Remedy]


def estimate_reserved(
    trace: Trace, recorded: Simulation | None, known: Completeness
) -> ReservedEstimates | None:
    """Simulate the pool, a plan, and settings; None if no simulation is possible.

    The pool is compared with the recorded peak. A setting is compared with the smaller of the recorded peak
    and the simulated peak under the recording's settings, so that simulation errors do not count as savings.
    The same applies to the pool if the recording lacks its beginning, since an unknown load may have caused
    the recorded reservations. For each setting the best value is reported.

    Args:
        trace: events of one device; simulated if recorded in PyTorch and at most `MOST_EVENTS` long.
        recorded: the recorded allocator, if known.
        known: the recorded part of the history; without any history, nothing is simulated.
    """
    if recorded is None or trace.metadata.get("framework") != "pytorch" or len(trace) > MOST_EVENTS:
        return None
    if known.history is History.ABSENT:
        return None
    own = recorded_settings(trace.metadata)
    expandable = trace.metadata.get("expandable") == "1"
    peak = recorded.peak_reserved_bytes
    now = _reserved(trace, "pytorch_expandable" if expandable else "pytorch", **own)
    base = peak if known.is_whole or now is None else min(peak, now)
    pool, plan = _reserved(trace, POOL), _reserved(trace, "planned")
    found = [] if pool is None else [_pool_remedy(base, pool, plan)]
    if now is not None and not expandable:  # settings do not help expandable segments
        found += _settings(trace, own, min(peak, now))
    refused = None
    if (trace.kind == EventType.REFUSED).any():
        asked, _ = refused_as_buffers(trace)
        refused = _reserved(asked, POOL), _reserved(asked, "planned")
    return ReservedEstimates(pool, plan, refused, found)


def _pool_remedy(base: int, pool: int, plan: int | None) -> Remedy:
    how = "run it under the pool: `mempool run`; other allocators: `mempool compare`; simulated"
    if plan is not None and base > plan:
        how += f", at best {binary(base - plan)} by a plan of all that was recorded"
    return Remedy("pool", base - pool, how)


def _settings(trace: Trace, own: dict[str, Any], base: int) -> list[Remedy]:
    best: dict[str, Remedy] = {}
    for setting, value, allocator in SETTINGS:
        change = {} if allocator == "pytorch_expandable" else {setting: value}
        if (reserved := _reserved(trace, allocator, **own | change)) is None:
            continue
        how = f"{setting}:{value} in PYTORCH_CUDA_ALLOC_CONF; simulated"
        remedy = Remedy("setting", base - reserved, how)
        best[setting] = max(remedy, best.get(setting, remedy), key=lambda candidate: candidate.saves_bytes)
    return list(best.values())


def _reserved(trace: Trace, allocator: str, **settings: Any) -> int | None:
    """Return the most bytes held from the device; None if the allocator refuses the settings or the trace."""
    try:
        simulation = simulate(trace, allocator, **settings)
    except (ValueError, TraceError):
        return None
    return simulation.peak_reserved_bytes if simulation.failed_at is None else None

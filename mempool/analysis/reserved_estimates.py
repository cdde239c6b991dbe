"""Reserved bytes of a PyTorch recording under the pool, a plan and other settings, by simulation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mempool.analysis.remedies import Remedy
from mempool.simulate import simulate
from mempool.units import binary
from solvers.simulators.pytorch import recorded_settings
from traces import Kind, TraceError
from traces.completeness import History
from traces.refused import with_attempts

if TYPE_CHECKING:
    from solvers.simulators import Simulation
    from traces import Trace
    from traces.completeness import Completeness

#: Most events of a simulated trace: longer traces take seconds.
MOST_EVENTS = 2_000_000
#: Settings to simulate: name, value (in MiB where a size), and the allocator that has the setting.
SETTINGS = (
    ("expandable_segments", True, "pytorch_expandable"),
    *(("max_split_size_mb", size, "pytorch") for size in (64, 128, 256)),
    *(("large_segment_size_mb", size, "pytorch") for size in (40, 100, 200)),
)


@dataclass(frozen=True)
class Tried:
    """Simulations of a recorded device.

    Attributes:
        pool_bytes: most bytes that `mempool run` would reserve; None where that cannot be simulated.
        plan_bytes: the arena of a plan of everything recorded: no pool that learns can do better.
        refused: the same two with the requests that failed; None where none did.
        remedies: changes that save memory, or not, compared with the recording.
    """

    pool_bytes: int | None
    plan_bytes: int | None
    refused: tuple[int | None, int | None] | None
    remedies: list[Remedy]


def tried(trace: Trace, recorded: Simulation | None, known: Completeness) -> Tried | None:
    """Simulate the pool, a plan, and settings; None if no simulation is possible.

    The pool is compared with the recorded peak. A setting is compared with the smaller of the recorded peak
    and the simulated allocator under the recording's settings, so that no simulation error counts as a merit
    of the setting. The same holds for the pool if the recording lacks a beginning, since the recorded
    reservation may have been made for an unknown load. For each setting the best value is reported.

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
    pool, plan = _reserved(trace, "planned_online"), _reserved(trace, "planned")
    found = [] if pool is None else [_pool_remedy(base, pool, plan)]
    if now is not None and not expandable:  # expandable segments lack the gaps that settings reduce
        found += _settings(trace, own, min(peak, now))
    refused = None
    if (trace.kind == Kind.REFUSED).any():
        asked, _ = with_attempts(trace)
        refused = _reserved(asked, "planned_online"), _reserved(asked, "planned")
    return Tried(pool, plan, refused, found)


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
        one = Remedy("setting", base - reserved, how)
        best[setting] = max(one, best.get(setting, one), key=lambda remedy: remedy.saves_bytes)
    return list(best.values())


def _reserved(trace: Trace, allocator: str, **settings: Any) -> int | None:
    """Return the most bytes held from the device; None if the allocator refuses the settings or the trace."""
    try:
        made = simulate(trace, allocator, **settings)
    except (ValueError, TraceError):
        return None
    return made.peak_reserved_bytes if made.failed_at is None else None

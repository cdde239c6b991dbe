"""What settings of PyTorch's allocator, or a plan, would have saved of a recording, by simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.analysis.remedies import PLAN, Remedy
from solvers.simulators import simulate
from solvers.simulators.pytorch_conf import recorded_settings
from traces import TraceError

if TYPE_CHECKING:
    from solvers.simulators import Simulation
    from traces import Trace

#: Longer traces are not tried: that takes seconds.
MOST_EVENTS = 2_000_000
#: What is tried: a setting, its value, in MiB where it is a size, and the allocator that has it.
SETTINGS = (
    ("expandable_segments", True, "pytorch_expandable"),
    *(("max_split_size_mb", size, "pytorch") for size in (64, 128, 256)),
    *(("large_segment_size_mb", size, "pytorch") for size in (40, 100, 200)),
)


def tried(trace: Trace, recorded: Simulation | None) -> list[Remedy] | None:
    """What each saves, which may be nothing or less; None where nothing can be tried.

    A plan is held against what was recorded. A setting is held against the smaller of that and the simulated
    allocator with the settings of the recording, so that no fault of the simulation counts as its merit. Of
    each setting the value that saves most is told.

    Args:
        trace: events of one device; tried if PyTorch's, and at most `MOST_EVENTS`.
        recorded: what the recorded allocator did, if that is known.
    """
    if recorded is None or trace.metadata.get("framework") != "pytorch" or len(trace) > MOST_EVENTS:
        return None
    peak = recorded.peak_reserved_bytes
    planned = _reserved(trace, "planned")
    found = [] if planned is None else [Remedy("plan", peak - planned, f"{PLAN}; simulated")]
    if trace.metadata.get("expandable") == "1":  # they have none of the gaps that the others are against
        return found
    own = recorded_settings(trace.metadata)
    if (now := _reserved(trace, "pytorch", **own)) is None:
        return found
    best: dict[str, Remedy] = {}
    for setting, value, allocator in SETTINGS:
        change = {} if allocator == "pytorch_expandable" else {setting: value}
        if (reserved := _reserved(trace, allocator, **own | change)) is None:
            continue
        how = f"{setting}:{value} in PYTORCH_CUDA_ALLOC_CONF; simulated"
        one = Remedy("setting", min(peak, now) - reserved, how)
        best[setting] = max(one, best.get(setting, one), key=lambda remedy: remedy.saves_bytes)
    return [*found, *best.values()]


def _reserved(trace: Trace, allocator: str, **settings: Any) -> int | None:
    """Most bytes held of the device; None where the allocator does not take the settings or the trace."""
    try:
        made = simulate(trace, allocator, **settings)
    except (ValueError, TraceError):
        return None
    return made.peak_reserved_bytes if made.failed_at is None else None

"""What would help, and by how much at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool.analysis.idle import LEAST_ABSENCE

if TYPE_CHECKING:
    from mempool.analysis.idle import Absences
    from mempool.analysis.peak import Peak
    from solvers.simulators import Simulation

#: What to do where more is reserved than is asked for.
PLAN = "place buffers by a plan: `mempool plan`; other allocators: `mempool compare`"


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Attributes:
        name: "plan", "setting" (of the recorded allocator), "free_earlier" or "swap".
        saves_bytes: of what is reserved, or of the peak load, at most.
        how: what to do, in a sentence.
    """

    name: str
    saves_bytes: int
    how: str


def remedies(
    peak: Peak,
    idle: Absences | None,
    recorded: Simulation | None,
    iteration_events: int,
    tried: list[Remedy] | None = None,
) -> list[Remedy]:
    """What would help, the largest saving first; nothing that saves nothing.

    Args:
        peak: who is alive at the peak load.
        idle: absences there, if accesses were recorded.
        recorded: what the recorded allocator did, if that is known.
        iteration_events: length of an iteration; of the whole trace where it repeats none.
        tried: what simulations say of plans and settings, where there were any.
    """
    found = list(tried or ())
    if recorded is not None and tried is None:
        lost = recorded.peak_reserved_bytes - peak.bytes
        found.append(Remedy("plan", lost, PLAN))
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
    return sorted((one for one in found if one.saves_bytes > 0), key=lambda one: -one.saves_bytes)

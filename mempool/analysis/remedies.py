"""What would help, and by how much at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool.analysis.idle import LEAST_ABSENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.analysis.idle import Absences
    from mempool.analysis.peak import Peak


@dataclass(frozen=True)
class Remedy:
    """One thing to do.

    Attributes:
        name: "pool", "setting" (of the recorded allocator), "fragmentation", "free_earlier" or "swap".
        saves_bytes: of what is reserved, or of the peak load, at most.
        how: what to do, in a sentence.
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
    """What would help, the largest saving first; nothing that saves nothing.

    Args:
        peak: who is alive at the peak load.
        idle: absences there, if accesses were recorded.
        unused: bytes reserved at most beyond the peak load, where a recording tells all of its history and
            nothing was simulated; else None.
        iteration_events: length of an iteration; of the whole trace where it repeats none.
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
    return sorted((one for one in found if one.saves_bytes > 0), key=lambda one: -one.saves_bytes)

"""Remedies that would save memory, with the most that each would save."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mempool.analysis.idle_at_peak import LEAST_ABSENCE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mempool.analysis.idle_at_peak import Absences
    from mempool.analysis.peak import Peak


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
    """Return the remedies that save anything, largest saving first.

    Args:
        peak: the buffers alive at the peak load.
        idle: absences at the peak, if accesses were recorded.
        unused: reserved peak minus peak load in bytes, if the recording has the whole history and nothing was
            simulated; else None.
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
    return sorted((one for one in found if one.saves_bytes > 0), key=lambda one: -one.saves_bytes)

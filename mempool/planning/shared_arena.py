"""Neighbours in a shared arena: plans of several clients, which avoid each other only after collisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.planning.options import OPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mempool import _core
    from mempool.planning.planned_pattern import PlannedPattern


class ArenaNeighbors:
    """Offsets of the other clients' plans in the arena, from the view of one client."""

    def __init__(self, client: _core.Client) -> None:
        """Permit overlaps with other clients' plans until the first collisions."""
        self._client = client
        self._collisions = 0  # number of collisions at the last check
        self._layouts: int | None = None  # others' layout changes at the last plan around them, or None

    def avoided_ranges(self) -> list[tuple[int, int]]:
        """Return the (begin, end) offsets that plans avoid; disjoint, in order."""
        return [] if self._layouts is None else self._others()

    @property
    def avoided_layouts(self) -> int | None:
        """Others' layout changes at the last plan around others; None while plans may overlap."""
        return self._layouts

    def shares_memory(self) -> bool:
        """Return true if other clients use this memory, or used it at the time of planning."""
        return self._layouts is not None or self.other_layouts() > 0

    def collides(self, plans: Iterable[PlannedPattern]) -> bool:
        """Return true if other clients' buffers repeatedly occupy the slots of these plans."""
        occupied = self.slot_collisions()
        if occupied - self._collisions < OPTIONS.neighbor_collisions or not (others := self._others()):
            return False
        if any(planned.is_blocked_by(others) for planned in plans):
            return True
        self._collisions = occupied  # collisions with the client's own buffers
        return False

    def may_move_closer(self) -> bool:
        """Return true if other clients have replanned or ended since the last plan around them."""
        return self._layouts is not None and self.other_layouts() != self._layouts

    def avoid_others(self) -> None:
        """Avoid the present plans of other clients from now on."""
        self._collisions, self._layouts = self.slot_collisions(), self.other_layouts()

    def allow_overlap(self) -> None:
        """Permit overlaps again, for lack of memory, until the next collisions."""
        self._layouts = None

    def slot_collisions(self) -> int:
        """Return the total number of allocations whose planned slot was occupied."""
        return int(self._client.stats()["outcomes"]["slot_occupied"])

    def _others(self) -> list[tuple[int, int]]:
        return self._client.other_plans_ranges()

    def other_layouts(self) -> int:
        """Return the total number of changes to other clients' plans."""
        return int(self._client.state()["other_layouts"])

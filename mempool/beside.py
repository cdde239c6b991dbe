"""Plans of several clients on one memory: beside each other where they are alive together, and no farther."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mempool import _core
    from mempool.planned import Planned

#: So many requests found another's buffer in their place before plans are made beside those of others.
MOST_COLLISIONS = 16
_NEVER_SEEN = (1 << 64) - 2  # a number of changes
#: What is to be kept out of is given to the solver as at most so many ranges.
MOST_RANGES = 64


class Beside:
    """Where the other clients' plans lie, as one client's plans have to do with it."""

    def __init__(self, client: _core.Client) -> None:
        """Plans lie over those of others, until they are in each other's way."""
        self._client = client
        self._collisions = 0  # when that was looked at last
        self._layouts: int | None = None  # of others, when plans were made beside them; None: they are not

    def reaches(self) -> list[tuple[int, int]]:
        """(begin, end) offsets that plans keep out of; disjoint, in order."""
        return [] if self._layouts is None else self._others()

    @property
    def layouts(self) -> int | None:
        """How often others had changed theirs when plans were made beside them; None: they were not."""
        return self._layouts

    def shares(self) -> bool:
        """Whether other clients use this memory, or have when plans were made."""
        return self._layouts is not None or self.others_changes() > 0

    def collides(self, plans: Iterable[Planned]) -> bool:
        """Whether others are alive where these plans lie, time and again."""
        occupied = self.occupied()
        if occupied - self._collisions < MOST_COLLISIONS or not (others := self._others()):
            return False
        if any(planned.is_blocked_by(others) for planned in plans):
            return True
        self._collisions = occupied  # with its own
        return False

    def may_come_closer(self) -> bool:
        """Whether others have planned anew, or are gone, since plans were made beside theirs."""
        return self._layouts is not None and self.others_changes() != self._layouts

    def begin(self) -> None:
        """Plans are made beside what others have planned by now."""
        self._collisions, self._layouts = self.occupied(), self.others_changes()

    def begin_anew(self) -> None:
        """Plans were made beside others elsewhere: whom they keep out of here is still to be seen."""
        self._layouts = _NEVER_SEEN

    def give_up(self) -> None:
        """There is no room: they lie over each other again, until more is in the way."""
        self._layouts = None

    def occupied(self) -> int:
        """How often something else was alive where an allocation should have been, ever."""
        return int(self._client.stats()["outcomes"]["occupied"])

    def _others(self) -> list[tuple[int, int]]:
        return joined(self._client.others_reach())

    def others_changes(self) -> int:
        """How often where others' plans lie has changed."""
        return int(self._client.state()["others_layouts"])


def joined(ranges: Sequence[tuple[int, int]], most: int = MOST_RANGES) -> list[tuple[int, int]]:
    """The same places as at most so many ranges that do not overlap, in order.

    Where there are more, the narrowest gaps between them are taken for places too.
    """
    from traces import ranges as ranges_of  # with NumPy

    whole = ranges_of.joined(ranges)
    if len(whole) <= most:
        return whole
    gaps = range(1, len(whole))
    widest = sorted(sorted(gaps, key=lambda i: whole[i - 1][1] - whole[i][0])[: most - 1])
    return [(whole[i][0], whole[j - 1][1]) for i, j in itertools.pairwise([0, *widest, len(whole)])]

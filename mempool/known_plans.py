"""The plans that the core replays, and whether the program follows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mempool.logs import log
from mempool.rest import NEVER
from mempool.versions import made_with

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mempool import _core
    from mempool.planned import Planned
    from traces.pattern import Pattern


#: After so many allocations off the plans, and fewer than this share of them ever on one, they are of no use.
MOST_STRAYS, LEAST_HITS = 1 << 14, 0.01
#: So many allocations, and two iterations, tell whether a plan is this program's.
LEAST_TO_JUDGE = 64
STRAYS = ("other_size", "occupied", "exhausted", "lost")
#: Plans remembered, as many as the core keeps.
MOST_KNOWN = 16


class KnownPlans:
    """One client's plans, the latest first.

    Attributes:
        latest: the plan made last, or None.
        made: how many were made.
    """

    def __init__(self, client: _core.Client, *, framework: str) -> None:
        """None are known yet; `framework`: whose memory it is, or empty."""
        self._client, self._framework = client, framework
        self._plans: list[Planned] = []
        self._loaded: Planned | None = None
        self._told_stranger = False
        self._dropped_at = 0, 0  # hits and strays when the plans were dropped last
        self._installed_at = 0, 0  # and when one was installed
        self.latest: Planned | None = None
        self.made = 0

    def __iter__(self) -> Iterator[Planned]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    def load(self, plans: Sequence[Planned]) -> None:
        """Plans from a file, which replay already, the latest first."""
        self.latest = self._loaded = plans[0]
        self._plans = list(plans)

    def install(self, planned: Planned, counts: list[int] | None, *, instead_of: Planned | None) -> bool:
        """Hand a plan to the core; as a new one, or instead of another of the same sequence.

        Returns:
            False: that other one is no longer known to the core, and so neither is here.
        """
        self.tell_of_a_stranger(at_last=True)
        pattern = planned.pattern
        instead = instead_of is not None
        if not self._client.install(planned.native(counts), pattern.iterations_seen, instead=instead):
            self._plans = [known for known in self if known is not instead_of]
            self.latest = next(iter(self._plans), None) if self.latest is instead_of else self.latest
            return False
        if instead_of is None:
            self.latest = planned
            self._plans = [planned, *(k for k in self if not planned.serves(k.pattern))][:MOST_KNOWN]
        else:
            self.latest = planned if self.latest is instead_of else self.latest
            self._plans = [planned if known is instead_of else known for known in self]
        self.made += 1
        self._installed_at = self._followed()
        log.info("planned %d buffers into %d bytes", len(pattern.buffers), planned.plan.arena_bytes)
        return True

    def drop(self) -> None:
        """Forget them all."""
        self._client.drop_patterns()
        self.latest, self._plans = None, []
        self._dropped_at = self._followed()

    def have_envelopes(self) -> bool:
        """Whether one is for iterations that differ in sizes."""
        return any(known.pattern.least is not None for known in self)

    def are_found(self) -> bool:
        """Whether there are any, and none is from a file."""
        return self._loaded is None and self.latest is not None

    def alike(self, pattern: Pattern) -> Planned | None:
        """The plan of this pattern, or else of this one begun at another place; None: there is none."""
        same = [known for known in self if known.same_sequence(pattern)]
        return next(iter(same or [known for known in self if known.rotates_to(pattern)]), None)

    def are_useless(self) -> bool:
        """Whether hardly anything ever followed them: they cost time and an arena, and help nobody.

        What was followed for long is not, for the program may come back to it. Nor is a plan from a file,
        whose program may be about to begin with what was planned, and with it what was planned since.
        """
        if self._loaded is not None or self.latest is None:
            return False
        hits, strays = self._followed_since(self._dropped_at)
        return strays >= MOST_STRAYS and hits < strays * LEAST_HITS

    def are_followed(self) -> bool:
        """Whether there is none yet, or more has followed than strayed since the last was made."""
        hits, strays = self._followed_since(self._installed_at)
        return self.latest is None or hits >= strays

    def judged_in(self) -> int:
        """After how many more allocations they may be of no use, or a loaded one another program's."""
        if self._loaded is not None:
            hits, strays = self._followed()
            return NEVER if self._told_stranger else self._least_to_judge() - hits - strays
        if self.latest is None:
            return NEVER
        hits, strays = self._followed_since(self._dropped_at)
        return max(MOST_STRAYS, int(hits / LEAST_HITS)) - strays

    def tell_of_a_stranger(self, *, at_last: bool = False) -> None:
        """Say once if the program, by now, should have followed the plan from a file and has not.

        Args:
            at_last: from now on it may follow another plan.
        """
        if self._loaded is None or self._told_stranger:
            return
        hits, strays = self._followed()
        if hits + strays < (LEAST_TO_JUDGE if at_last else self._least_to_judge()):
            return
        self._told_stranger = True
        if hits < strays:
            now = made_with(self._framework)
            known = self._loaded.made_with and self._loaded.made_with != now
            made = f" (made with {self._loaded.made_with}, this is {now})" if known else ""
            log.warning(
                "hardly anything follows the plan so far%s: is it another program's or model's?", made
            )

    def _least_to_judge(self) -> int:
        assert self._loaded is not None
        return max(LEAST_TO_JUDGE, 2 * len(self._loaded.buffers))

    def _followed(self) -> tuple[int, int]:
        """How many allocations ever hit, and how many were expected otherwise."""
        outcomes = self._client.stats()["outcomes"]
        return outcomes["hit"], sum(outcomes[kind] for kind in STRAYS)

    def _followed_since(self, then: tuple[int, int]) -> tuple[int, int]:
        hits, strays = self._followed()
        return hits - then[0], strays - then[1]

"""A limit that is a share of the first iteration's peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mempool.logs import log
from mempool.torch.optimizer_steps import Listener
from mempool.units import sized

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool import _core


class RelativeLimit:
    """Decides a limit such as 80% when the first iteration ends.

    The limit is a share of the high-water mark. Optimizer state made in the first step is added to the
    high-water mark before that step, since later iterations hold the state all the time.
    """

    def __init__(self, share: str, client: _core.Client, decide: Callable[[int], None]) -> None:
        """Observe a pool's client; call `decide` with the limit in bytes.

        Args:
            share: the share, such as "80%".
            client: the client whose memory counts.
            decide: called once.
        """
        self._share, self._client, self._decide = share, client, decide
        self._live_before = self._peak_before = self._state_bytes = 0
        self._listener = Listener(before=self._before_step, after=self._after_step)

    def _before_step(self, _: Any) -> None:
        live = self._client.stats()["live"]
        self._live_before = live["current"]
        if self._state_bytes == 0:
            self._peak_before = live["peak"]

    def _after_step(self, _: Any) -> None:
        self._state_bytes += max(self._client.stats()["live"]["current"] - self._live_before, 0)

    def end_iteration(self) -> None:
        """Decide the limit."""
        self.end()
        peak = max(int(self._client.stats()["live"]["peak"]), self._peak_before + self._state_bytes)
        limit = max(int(peak * float(self._share.rstrip("%")) / 100), 1)
        log.info("the limit of %s is %s, of a peak of %s", self._share, sized(limit), sized(peak))
        self._decide(limit)

    def end(self) -> None:
        """Stop observing."""
        self._listener.remove()

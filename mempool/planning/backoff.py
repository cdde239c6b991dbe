"""Exponential backoff of planning a pattern again."""

from __future__ import annotations

NEVER = 1 << 62


class ExponentialBackoff:
    """Exponential backoff, in iterations, for an action that may be requested without end.

    Attributes:
        allowed_at: first iteration in which the action is allowed again.
    """

    def __init__(self, longest: int = NEVER) -> None:
        """Allow the action at once; no pause is longer than `longest` iterations."""
        self.allowed_at, self._gap, self._longest = 0, 2, longest

    def is_allowed(self, iteration: int) -> bool:
        """Return true if the action is allowed in this iteration."""
        return iteration >= self.allowed_at

    def forbid_before(self, iteration: int) -> None:
        """Forbid the action before this iteration."""
        self.allowed_at = iteration

    def record_attempt(self, iteration: int) -> None:
        """Note that the action is done in this iteration, and double the pause."""
        self._gap = min(2 * self._gap, self._longest)
        self.allowed_at = iteration + self._gap

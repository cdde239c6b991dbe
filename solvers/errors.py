"""The one error of this package."""

from __future__ import annotations


class PlanError(ValueError):
    """A plan that does not hold, or a plan file that cannot be what it says it is."""

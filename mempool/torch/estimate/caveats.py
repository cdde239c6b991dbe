"""Restrictions of a result, which leave open whether a job fits."""

from __future__ import annotations

from typing import NamedTuple

WITHOUT_LOSS = "peak without the loss"
AS_FAR_AS_RAN = "only of what ran"


class Caveat(NamedTuple):
    """A restriction of a result: a label that goes with the verdict, and the reason."""

    label: str
    reason: str

    def __str__(self) -> str:
        return f"{self.label}: {self.reason}"

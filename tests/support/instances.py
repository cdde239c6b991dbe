"""Instances that several tests pack."""

from __future__ import annotations

from typing import Any

from traces.buffers import Buffers


def crossing(**columns: Any) -> Buffers:
    """A least instance, found at random, whose peak load of 8 cannot be reached; only a search shows that."""
    return Buffers.of([1, 4, 0, 1, 3, 5, 0], [2, 5, 4, 5, 7, 8, 1], [3, 3, 2, 3, 2, 4, 4], **columns)

"""Plans in and out of Parquet."""

from __future__ import annotations


def write_plan() -> None:
    """To come."""


def read_plan() -> None:
    """To come."""

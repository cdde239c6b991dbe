"""Sizes of memory on the command line: a small number without a unit is an error."""

from __future__ import annotations

import pytest

from mempool.errors import UsageError
from mempool.units import parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GiB", 24 << 30),
        ("12 GB", 12 * 10**9),
        ("24B", 24),
        ("0", 0),
        ("1048576", 1 << 20),
        ("8e9", 8 * 10**9),
        (" 24 gib ", 24 << 30),
    ],
)
def test_sizes_with_a_unit_and_plausible_numbers_of_bytes_are_taken(text: str, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize(
    ("text", "remedy"),
    [("24", "24GiB"), ("1.5", "1.5GiB"), ("24564", "24564MiB"), ("1e2", "1e2GiB"), ("1048575", "1048575MiB")],
)
def test_small_number_without_a_unit_names_the_unit(text: str, remedy: str) -> None:
    with pytest.raises(
        UsageError, match=f"'{text}' has no unit: say {remedy}, or {text}B if bytes are meant"
    ):
        parse_memory(text)

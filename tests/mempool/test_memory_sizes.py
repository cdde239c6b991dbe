"""Sizes of memory on the command line: a small number without a unit is an error, in every verb."""

from __future__ import annotations

import pytest

from mempool.cli.app import call
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


@pytest.mark.parametrize(
    "arguments",
    [
        ["fit", "m:f", "--limit", "24"],
        ["compare", "run.trace", "--limit", "24"],
        ["swap", "run.trace", "--limit", "24"],
        ["swap", "run.trace", "--host", "24"],
        ["swap", "run.trace", "--bandwidth", "24"],
        ["run", "--limit", "24", "script.py"],
        ["run", "--max-reserved", "24", "script.py"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_every_verb_asks_for_the_unit_of_a_memory(
    arguments: list[str], tmp_path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    assert call(arguments) == 2
    assert "'24' has no unit: say 24GiB" in " ".join(capsys.readouterr().err.split())


def test_compare_accepts_a_bare_limit_of_at_least_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    assert call(["compare", "none.trace", "--limit", "512"]) != 2
    assert "no unit" not in capsys.readouterr().err

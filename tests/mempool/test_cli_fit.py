"""Completion of ``mempool fit``, which needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_names_are_completed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mempool.cli.fit import command

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    cards = command.complete_cards("rtx 40")
    assert {"RTX 4060", "RTX 4060 Ti 8GB", "RTX 4080", "RTX 4090"} < set(cards)
    assert all(card.startswith("RTX 40") for card in cards)
    assert "train.py" in command.complete_targets("tr")
    assert "planned" in command.allocators()("pl")

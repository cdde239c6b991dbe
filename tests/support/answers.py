"""What a verb says with ``--json``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mempool.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def said(capsys: pytest.CaptureFixture[str], *command: str | Path, code: int = 0) -> dict[str, Any]:
    """The one object on stdout of a command that ends so."""
    capsys.readouterr()
    assert call([str(part) for part in (*command, "--json")]) == code
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer

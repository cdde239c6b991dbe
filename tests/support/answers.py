"""Runs of the command line in this process: the JSON answer, the printed text, the one line of an error."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mempool.cli.app import call

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def answer(capsys: pytest.CaptureFixture[str], *command: str | Path, code: int = 0) -> Any:
    """Return the JSON value that a command with this exit code prints."""
    return json.loads(printed(capsys, *command, "--json", code=code))


def printed(capsys: pytest.CaptureFixture[str], *command: str | Path, code: int = 0) -> str:
    """Return the text that a command with this exit code prints to stdout."""
    capsys.readouterr()
    assert call([str(part) for part in command]) == code
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *command: str | Path, code: int) -> str:
    """Return the single line that a command with this exit code prints to stderr."""
    capsys.readouterr()
    assert call([str(part) for part in command]) == code
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line

"""Runs of the command line in this process: the JSON answer, the printed text, the one line of an error."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mempool.cli.app import call


class Cli:
    """The command line; each method asserts the exit code, and splits strings, but no paths, into words."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *command: str | Path, code: int = 0) -> tuple[str, str]:
        """Return the output on stdout and on stderr."""
        self.capsys.readouterr()
        words = [[str(part)] if isinstance(part, Path) else shlex.split(part) for part in command]
        found = call([word for part in words for word in part])
        out, err = self.capsys.readouterr()
        assert found == code, err
        return out, err

    def answer(self, *command: str | Path, code: int = 0) -> Any:
        return json.loads(self.run(*command, "--json", code=code)[0])

    def printed(self, *command: str | Path, code: int = 0) -> str:
        return self.run(*command, code=code)[0]

    def error(self, *command: str | Path, code: int) -> str:
        """Return the only line on stderr."""
        line = self.run(*command, code=code)[1]
        assert line.count("\n") == 1
        return line

"""Direct launch of a program: equal to the full command line, with fewer imports."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mempool.cli.app import call
from mempool.cli.run import exec as launch

if TYPE_CHECKING:
    from pathlib import Path


class Started(BaseException):
    """The program would have begun."""


def started(how: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...] | None:
    """Return the program and options that would be started; None if none."""
    seen: list[tuple[Any, ...]] = []

    def start(*program: Any, **options: Any) -> None:
        seen.append((*map(list, program), options))
        raise Started

    with monkeypatch.context() as patch:
        patch.setattr(launch, "start", start)
        try:
            how()
        except Started:
            return seen[0][0], {k: v for k, v in seen[0][1].items() if v is not None}
    return None


WORDS = (
    *launch.OPTIONS,
    *("-m", "-c", "--", "-", "-q", "--help", "-h", "--record=t", "there.py", "not there", "a/b", "pass", ""),
)


@example(words=["--record", "", "there.py"])
@example(words=["--json", "", "there.py"])
@given(words=st.lists(st.sampled_from(WORDS), max_size=6))
def test_direct_launch_equals_the_full_command_line_or_declines(
    words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any command line starts the same program with the same options, or is left to the full command."""
    folder = tmp_path_factory.mktemp("launch")
    (folder / "there.py").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        straight = started(lambda: launch.launch(words), patch)
        if straight is not None:
            assert straight == started(lambda: call(["run", *words]), patch)


@pytest.mark.parametrize(
    "words",
    [
        ["there.py"],
        ["-m", "there", "--x"],
        ["--quiet", "--json", "out", "-c", "pass"],
        ["--record", "t", "there.py"],
    ],
)
def test_plain_command_lines_go_straight(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scripts, modules and code, with flags and files."""
    (tmp_path / "there.py").touch()
    monkeypatch.chdir(tmp_path)
    assert started(lambda: launch.launch(words), monkeypatch) is not None


def test_launch_imports_nothing_heavy_before_the_program_begins(tmp_path: Path) -> None:
    """Neither command-line libraries nor NumPy."""
    code = (
        "import os, sys\n"
        "os.execve = lambda *_: sys.exit(' '.join(sys.modules))\n"
        "sys.argv = ['mempool', 'run', '-c', 'pass']\n"
        "from mempool.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    loaded = done.stderr.split()
    assert "mempool.cli.run.exec" in loaded
    assert not {"typer", "click", "rich", "pydantic", "numpy"} & set(loaded)

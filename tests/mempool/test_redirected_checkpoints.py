"""Files of a rehearsed program: checkpoints are found by all processes, older files are not written over."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mempool.rehearsal.checkpoints import Redirection

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize("act", [shutil.copy, shutil.copyfile, shutil.move, os.replace, os.rename])
def test_copied_and_renamed_checkpoints_are_read_by_all_processes(
    act: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, name = tmp_path / "redirected", act.__name__
    redirected: list[str] = []
    own, other = Redirection(folder, redirected, []), Redirection(folder, [], [])
    own.patch_files()
    try:
        with open("before.pt", "w") as file:  # noqa: PTH123 - as programs do
            file.write(name)
        getattr(shutil if hasattr(shutil, name) else os, name)("before.pt", "after.pt")
        os.chmod("after.pt", 0o600)  # noqa: PTH101
        assert os.path.getsize("after.pt") == len(name)  # noqa: PTH202
        with open("after.pt") as file:  # noqa: PTH123
            assert file.read() == name
    finally:
        own.restore_files()
    assert Path(other.known("after.pt")).read_text() == name
    assert redirected == (["before.pt", "after.pt"] if name.startswith("copy") else ["after.pt"])
    assert [path.name for path in tmp_path.iterdir()] == ["redirected"]


@pytest.fixture
def redirected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Enter a folder with older files, which are as before at the end; yield the list of redirected files."""
    folder, older = tmp_path / "program", ("log.txt", "replaced.json", "copied.json", "moved.json")
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name in older:
        Path(name).write_text("old")
        os.utime(name, (1, 1))
    names: list[str] = []
    redirection = Redirection(tmp_path / "kept", names, [])
    redirection.patch_files()
    yield names
    redirection.restore_files()
    assert all(Path(name).read_text().startswith("old") for name in older)


def test_program_writes_over_its_own_files_and_not_over_older_ones(redirected: list[str]) -> None:
    for text in ("1", "22"):
        Path("fresh.txt").write_text(text)
        assert Path("fresh.txt").stat().st_size == len(text)
        takes = {"replaced.json": os.replace, "copied.json": shutil.copy, "moved.json": shutil.move}
        for target, take in takes.items():
            Path("partial").write_text(text)
            take("partial", target)
            assert Path(target).read_text() == text
    assert redirected == ["replaced.json", "copied.json", "moved.json"]


def test_program_does_not_write_over_an_older_file_with_lines_of_its_own(redirected: list[str]) -> None:
    with Path("log.txt").open("a") as file:
        file.write(" and new")
    Path("log.txt").write_text("new")
    assert redirected == ["log.txt"]
    assert Path("log.txt").read_text() == "new"
    assert Path("log.txt").stat().st_size == len("new")

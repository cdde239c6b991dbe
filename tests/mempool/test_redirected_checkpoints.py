"""Checkpoints of a rehearsed program, copied and renamed: found by this process and by others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mempool.rehearsal.checkpoints import Redirection


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
        with open("after.pt") as file:  # noqa: PTH123
            assert file.read() == name
    finally:
        own.restore_files()
    assert Path(other.known("after.pt")).read_text() == name
    assert redirected == ["before.pt"]
    assert [path.name for path in tmp_path.iterdir()] == ["redirected"]

"""New checkpoints of a rehearsed program are found by all its processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
    own, other = Redirection(folder, redirected), Redirection(folder, [])
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


def test_redirected_checkpoints_are_read_through_links_and_in_renamed_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    redirection = Redirection(tmp_path / "redirected", [])
    redirection.patch_files()
    try:
        os.mkdir("staging")  # noqa: PTH102 - as programs do
        with open("staging/last.pt", "w") as file:  # noqa: PTH123
            file.write("last")
        os.symlink("last.pt", "staging/link")  # noqa: PTH211
        os.rename("staging", "done")  # noqa: PTH104
        for name in ("done/last.pt", "done/link"):
            with open(name) as file:  # noqa: PTH123
                assert file.read() == "last"
        assert not os.path.exists("staging/last.pt")  # noqa: PTH110
        os.remove("done/link")  # noqa: PTH107
        assert os.path.exists("done/last.pt")  # noqa: PTH110
    finally:
        redirection.restore_files()
    assert not any(Path("done").iterdir())


def test_safetensors_of_any_framework_keep_an_older_file(tmp_path: Path) -> None:
    """In a process of its own, where its modules are imported after the patch."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    (tmp_path / "old.safetensors").write_text("old")
    program = """
from pathlib import Path
from mempool.rehearsal.checkpoints import Redirection
Redirection(Path("kept").absolute(), []).patch_torch()
import numpy, torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
for name in ("old.safetensors", "new.safetensors"):
    save_torch({"x": torch.ones(3)}, name)
    save_file({"x": numpy.full(3, 2.0)}, name)
    assert load_file(name)["x"].sum() == 6
    with safe_open(name, "np") as file:
        assert file.keys() == ["x"]
"""
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "old.safetensors").read_text() == "old"
    assert not (tmp_path / "new.safetensors").exists()

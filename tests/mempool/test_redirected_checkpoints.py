"""New checkpoints of a rehearsed program, and all its new files before a run, are found by all processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mempool.rehearsal import kept_files

pytestmark = pytest.mark.skipif(not kept_files.LIBRARY.is_file(), reason="the library is for Linux")


def finish(tmp_path: Path, program: str, *, before_run: bool = False) -> kept_files.KeptFiles:
    """Run a program in a folder of its own, and return its changes after it."""
    folder = tmp_path / "rehearsal"
    folder.mkdir()
    environment = os.environ | kept_files.environment(folder, time.time_ns(), before_run=before_run)
    imports = "import glob, os, shutil, sqlite3, subprocess, sys\nfrom pathlib import Path\n"
    subprocess.run([sys.executable, "-c", imports + program], env=environment, check=True)
    return kept_files.finish(folder)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter an empty folder."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")


@pytest.mark.parametrize(
    "line",
    [
        "shutil.copy('before.pt', 'after.pt'); os.remove('before.pt')",
        "shutil.move('before.pt', 'after.pt')",
        "os.replace('before.pt', 'after.pt')",
        "os.rename('before.pt', 'x'); subprocess.run(['mv', 'x', 'after.pt'], env={}, check=True)",
        "subprocess.run('cat before.pt > tmp; mv tmp after.pt; rm before.pt', shell=True, check=True)",
        "subprocess.run(['sed', '-i', 's/x/x/', 'before.pt']); os.rename('before.pt', 'after.pt')",
        "os.rename('before.pt', 'x'); subprocess.run('cp x y; ln y after.pt; rm x y', shell=True)",
        "os.symlink('before.pt', 'l'); shutil.copy('l', 'after.pt'); os.remove('l'); os.remove('before.pt')",
        "os.mkdir('d'); os.rename('before.pt', 'd/a.pt'); os.rename('d', 'e')\n"
        "os.rename('e/a.pt', 'after.pt'); os.rmdir('e')",
        "exchange = __import__('ctypes').CDLL(None).renameat2\n"
        "Path('x').touch(); assert exchange(-100, b'x', -100, b'before.pt', 2) == -1\n"
        "os.rename('before.pt', 'x'); os.rename('x', 'after.pt')",
    ],
)
def test_copied_and_renamed_checkpoints_are_read_by_all_processes(tmp_path: Path, line: str) -> None:
    program = f"""
Path("before.pt").write_text("content")
assert os.path.getsize("before.pt") == 7 and glob.glob("*.pt") == ["before.pt"]
{line}
assert os.listdir(".") == ["after.pt"] and not os.path.exists("before.pt")
os.chmod("after.pt", 0o600)
assert subprocess.run("set -C; > after.pt", shell=True).returncode
assert Path("after.pt").read_text() == "content"
assert subprocess.check_output(["cat", "after.pt"], env={{}}) == b"content"
"""
    changes = finish(tmp_path, program)
    assert (changes.written, changes.not_removed, changes.left) == (["after.pt"], [], [])
    assert not any(Path.cwd().iterdir())
    assert len(list((tmp_path / "rehearsal" / "files").iterdir())) == 2  # one copy, and the journal


def test_checkpoint_that_another_program_replaces_stays(tmp_path: Path) -> None:
    changes = finish(
        tmp_path,
        "for name in ('a.pt', 'b.pt', 'c.pth.tar'): Path(name).write_text('ours')\n"
        "subprocess.run('echo theirs > a.pt; touch new; mv new b.pt', shell=True, check=True,"
        " env={'MEMPOOL_FILES': '', 'PATH': os.environ['PATH']})\n"
        "assert [Path(name).read_text() for name in ('a.pt', 'c.pth.tar')] == ['ours', 'ours']",
    )
    assert changes.written == ["c.pth.tar"]
    assert {path.name: path.read_text() for path in Path.cwd().iterdir()} == {"a.pt": "theirs\n", "b.pt": ""}


def test_large_file_that_becomes_a_checkpoint_is_empty(tmp_path: Path) -> None:
    large = "with open('large', 'wb') as file: file.truncate((1 << 30) + 1)\n"
    finish(tmp_path, f"{large}os.rename('large', 'a.pt'); assert os.path.getsize('a.pt') == 0")


def test_new_files_before_a_run_are_found_by_all_processes_and_gone_afterwards(tmp_path: Path) -> None:
    Path("old").mkdir()
    Path("old/a").write_text("old")
    program = """
os.makedirs("out/parts/")
os.symlink("out", "link")
Path("link/log").write_text("one")
subprocess.run("echo two >> out/log; mkdir more; sed -i s/one/1/ out/log", shell=True, check=True)
assert Path("out/log").read_text() == "1two\\n"
database = sqlite3.connect("out/data")
database.execute("create table t (x)")
database.commit()
assert sqlite3.connect("link/data").execute("select * from t").fetchall() == []
os.rename("old/a", "moved")
assert Path("moved").read_text() == "old"
Path("run.sh").write_text("#!/bin/sh\\necho ran")
os.chmod("run.sh", 0o700)
assert subprocess.check_output(["./run.sh"]) == b"ran\\n"
os.rename("out", "last")
os.makedirs(".new/x")
Path(".new/x/y").touch()
"""
    changes = finish(tmp_path, program, before_run=True)
    assert (changes.not_removed, changes.left) == (["old/a"], [])
    assert set(changes.written) == {"moved", "run.sh", "last/log", "last/data", ".new/x/y"}
    assert sorted(map(str, Path().rglob("*"))) == ["old", "old/a"]
    assert Path("old/a").read_text() == "old"


def test_folder_with_files_of_others_stays_after_a_rehearsal(tmp_path: Path) -> None:
    Path(".cache").mkdir()
    others = "env={'MEMPOOL_FILES': '', 'PATH': os.environ['PATH']}"
    program = f"""
os.makedirs("ours/empty")
os.makedirs("theirs/sub")
open("theirs/sub/ours.txt", "x").close()
Path(".cache/kept").write_text("kept")
shutil.copy({str(kept_files.LIBRARY)!r}, "library.so")
__import__("ctypes").CDLL("./library.so")
subprocess.run(["touch", "theirs/sub/theirs.txt"], {others})
"""
    changes = finish(tmp_path, program, before_run=True)
    assert changes.left == [str(Path("theirs").absolute())]
    stay = [".cache", ".cache/kept", "library.so", "theirs", "theirs/sub", "theirs/sub/theirs.txt"]
    assert sorted(map(str, Path().rglob("*"))) == stay
    assert Path(".cache/kept").read_text() == "kept"


def test_outcome_of_a_program_in_a_folder_above_the_rehearsal_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MEMPOOL_CACHE", str(tmp_path))
    finish(tmp_path, "Path('rehearsal/outcome.json').write_text('1'); Path('new').touch()", before_run=True)
    assert Path("rehearsal/outcome.json").read_text() == "1"
    assert not Path("new").exists()


def test_safetensors_of_any_framework_keep_an_older_file(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    Path("old.safetensors").write_text("old")
    time.sleep(0.02)  # the clock of files is coarser than that of the rehearsal's beginning
    program = """
from mempool.cli.run.child import AfterImport
from mempool.rehearsal import checkpoints
sys.meta_path.insert(0, AfterImport(lambda name: checkpoints.adjust(name, []), checkpoints.MODULES))
import numpy
from safetensors.numpy import load_file, save_file
import torch
from safetensors import safe_open
from safetensors.torch import save_file as save_torch
for name in ("old.safetensors", "new.safetensors"):
    save_torch({"x": torch.ones(3)}, name)
    save_file({"x": numpy.full(3, 2.0)}, name)
    assert load_file(name)["x"].sum() == 6
    with safe_open(name, "np") as file:
        assert file.keys() == ["x"]
torch.save(torch.ones(3), "checkpoint")
assert torch.load("checkpoint").sum() == 3
large = torch.empty((1 << 30) + 1, dtype=torch.uint8, device="meta")
for save in (torch.save, lambda tensors, name: save_torch({"x": tensors}, name)):
    save(large, "large.tmp")
    os.replace("large.tmp", "large")
    assert os.path.getsize("large") == 0
"""
    changes = finish(tmp_path, program)
    assert set(changes.written) == {"old.safetensors", "new.safetensors", "checkpoint", "large"}
    assert Path("old.safetensors").read_text() == "old"
    assert [path.name for path in Path().iterdir()] == ["old.safetensors"]

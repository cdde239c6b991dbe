"""Older files stay unchanged, new files are gone afterwards, and all processes see the changes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mempool.rehearsal import kept_files

pytestmark = pytest.mark.skipif(not kept_files.LIBRARY.is_file(), reason="the library is for Linux")
OLD = {f"old/{name}": f"old {name}" for name in "abcdefgh"} | {"old/sub/x": "old x"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a folder with files from before; returns the folder of the rehearsal."""
    work, kept = tmp_path / "work", tmp_path / "kept"
    (work / "old" / "sub").mkdir(parents=True)
    kept.mkdir()
    monkeypatch.chdir(work)
    for name, text in OLD.items():
        Path(name).write_text(text)
    (work / "old" / "link").symlink_to("a")
    (work / "old" / "b").chmod(0o400)  # which keeps no file from taking the name
    return kept


def state() -> dict[str, object]:
    """Return times, modes and contents of all files."""
    found = {str(path): path.lstat() for path in Path("old").rglob("*")}
    small = [path for path, status in found.items() if Path(path).is_file() and status.st_size < 1 << 20]
    times = {path: (status.st_mtime_ns, status.st_mode) for path, status in found.items()}
    return {**times, **{f"content of {path}": Path(path).read_bytes() for path in small}}


def kept(folder: Path, *command: str, code: int = 0) -> kept_files.KeptFiles:
    """Run a command that must not change older files; return its changes."""
    before = state()
    # The clock of files is coarser than that of the rehearsal's beginning.
    began = max(path.lstat().st_ctime_ns for path in Path().rglob("*")) + 1
    environment = os.environ | kept_files.environment(folder, began)
    assert subprocess.run(command, env=environment, check=False).returncode == code
    changes, after = kept_files.finish(folder), state()
    assert {path: after[path] for path in before} == before
    return changes


def python(folder: Path, *lines: str) -> kept_files.KeptFiles:
    imports = "import ctypes, glob, os, shutil, sqlite3, subprocess, sys\nfrom pathlib import Path"
    return kept(folder, sys.executable, "-c", "\n".join((imports, *lines)))


def new_files() -> dict[str, str]:
    """Return the content of each new file, by path; a folder is empty."""
    new = [path for path in Path().rglob("*") if path.parts[0] != "old"]
    return {str(path): path.read_text() if path.is_file() else "" for path in new}


@pytest.mark.parametrize(
    "line",
    [
        "Path('old/a').write_text('new')",
        "open(b'old/a', 'r+').write('n')",
        "os.write(os.open('a', os.O_RDWR, dir_fd=os.open('old', os.O_RDONLY)), b'n')",
        "os.truncate('old/a', 2)",
        "open(f\"/proc/self/fd/{os.open('old/a', os.O_RDONLY)}\", 'w').write('n')",
        "Path('fresh').write_text('n'); os.replace('fresh', 'old/a')",
        "open('old/link', 'w').write('through a link')",
        "subprocess.run(['sed', '-i', 's/old/new/', 'old/a'], check=True)",
        "subprocess.run(['bash', '-c', 'echo new >> old/a'], env={'PATH': os.environ['PATH']}, check=True)",
        "os.posix_spawn('/bin/sh', ['sh', '-c', 'echo new > old/a'], {}); os.wait()",
    ],
)
def test_program_reads_written_content_of_a_file_that_stays_unchanged(folder: Path, line: str) -> None:
    seen = "assert Path('old/a').read_bytes() != b'old a' and os.stat('old/a').st_size != 0"
    again = "assert subprocess.check_output(['cat', 'old/a']) == Path('old/a').read_bytes()"
    assert python(folder, line, seen, again) == (["old/a"], [], [])


@pytest.mark.parametrize(
    "line",
    [
        "os.remove('old/a')",
        "os.rename('old/a', 'old/b'); assert Path('old/b').read_text() == 'old a'",
        "subprocess.run('mv old/a moved', shell=True); assert Path('moved').read_text() == 'old a'",
        "os.rename('old', 'moved'); assert Path('moved/sub/x').read_text() == 'old x'",
        "os.remove('old/b'); os.rename('old', 'moved'); assert os.readlink('moved/link') == 'a'",
        "subprocess.run(['rm', '-r', 'old'], check=True); assert not Path('old').is_dir()",
        "shutil.rmtree('old'); os.makedirs('old'); assert os.listdir('old') == []",
        "shutil.rmtree('old'); os.mkdir('n'); Path('n/b').touch(); os.rename('n', 'old'); "
        "assert os.listdir('old') == ['b']",
    ],
)
def test_removed_file_is_hidden_and_stays(folder: Path, line: str) -> None:
    hidden = "assert not os.path.lexists('old/a') and not (Path('old').is_dir() and 'a' in os.listdir('old'))"
    again = "Path('old').mkdir(exist_ok=True); open('old/a', 'x').write('again')"
    read = "assert Path('old/a').read_text() == 'again'"
    assert python(folder, line, hidden, again, read).not_removed[0] in ("old", "old/a")


def test_times_modes_and_links_of_older_files_stay(folder: Path) -> None:
    lines = ["os.utime('old/a')", "os.chmod('old/a', 0o700)", "os.fchmod(os.open('old/b', 0), 0)"]
    lines += ["os.link('old/c', 'new')", "open('new', 'w').write('n')", "shutil.copystat('old/d', 'old/e')"]
    assert python(folder, *lines) == (["new"], [], [])


def test_older_link_stays_if_another_takes_its_name(folder: Path) -> None:
    made = "os.symlink('b', 'new'); os.replace('new', 'old/link'); assert not os.path.lexists('new')"
    again = "os.remove('old/link'); os.symlink('b', 'old/link'); assert os.readlink('old/link') == 'a'"
    assert python(folder, made, again) == ([], ["old/link"], [])


def test_older_database_stays_and_files_outside_the_current_folder_are_written(folder: Path) -> None:
    make = "import sqlite3; c = sqlite3.connect('old/data'); c.execute('create table t (x)'); c.commit()"
    subprocess.run([sys.executable, "-c", make], check=True)
    insert = "c = sqlite3.connect('old/data'); c.execute('insert into t values (1)'); c.commit()"
    asked = "assert sqlite3.connect('old/data').execute('select * from t').fetchall() == [(1,)]"
    lines = ["Path('../new').write_text('1')", "Path('../new').write_text('2')"]
    assert python(folder, insert, asked, *lines, "os.rename('../new', '../out')") == (["old/data"], [], [])
    assert Path("../out").read_text() == "2"


def test_large_file_is_read_only(folder: Path) -> None:
    with Path("old/large").open("wb") as file:
        file.truncate((1 << 30) + 1)
    opened = "open('old/large', 'rb').read(1); open('old/large', 'r+b')"
    program = f"try: {opened}\nexcept OSError as error: raise SystemExit(error.errno)"
    assert kept(folder, sys.executable, "-c", program, code=30) == ([], [], [])


@pytest.mark.parametrize(
    "line",
    [
        "os.rename('before.pt', 'x'); subprocess.run(['mv', 'x', 'after.pt'], env={}, check=True)",
        "subprocess.run('cat before.pt > tmp; mv tmp after.pt; rm before.pt', shell=True, check=True)",
        "os.rename('before.pt', 'x'); subprocess.run('cp x y; ln y after.pt; rm x y', shell=True)",
        "os.symlink('before.pt', 'l'); shutil.copy('l', 'after.pt'); os.remove('l'); os.remove('before.pt')",
        "os.mkdir('d'); os.rename('before.pt', 'd/a.pt'); os.rename('d', 'e')\n"
        "os.rename('e/a.pt', 'after.pt'); os.rmdir('e')",
        "exchange = ctypes.CDLL(None).renameat2\n"
        "Path('x').touch(); assert exchange(-100, b'x', -100, b'before.pt', 2) == -1\n"
        "os.rename('before.pt', 'x'); os.rename('x', 'x'); os.rename('x', 'after.pt')",
    ],
)
def test_copied_and_renamed_checkpoints_are_read_by_all_processes(folder: Path, line: str) -> None:
    program = f"""
Path("before.pt").write_text("content")
assert os.path.getsize("before.pt") == 7 and glob.glob("*.pt") == ["before.pt"]
{line}
assert sorted(os.listdir(".")) == ["after.pt", "old"] and not os.path.exists("before.pt")
os.chmod("after.pt", 0o600)
assert subprocess.run([sys.executable, "-c", "open('after.pt', 'x')"], stderr=-3).returncode
assert subprocess.check_output(["cat", "after.pt"], env={{}}) == b"content"
"""
    assert python(folder, program) == (["after.pt"], [], [])
    assert not new_files()
    assert len(list((folder / "files").iterdir())) == 2  # one copy, and the journal


def test_checkpoint_that_another_program_replaces_stays(folder: Path) -> None:
    write = "for name in ('a.pt', 'b.pt', 'c.pth.tar'): Path(name).write_text('ours')"
    commands = "'echo theirs > a.pt; touch new; mv new b.pt', shell=True, env={'MEMPOOL_FILES': ''}"
    read = "assert [Path(name).read_text() for name in ('a.pt', 'c.pth.tar')] == ['ours', 'ours']"
    assert python(folder, write, f"subprocess.run({commands})", read).written == ["c.pth.tar"]
    assert new_files() == {"a.pt": "theirs\n", "b.pt": ""}


def test_processes_find_a_checkpoint_that_others_replace(folder: Path) -> None:
    replaces = "open(own, 'w').write(f'{k:05}'); os.replace(own, 'last.pt')"
    reads = (
        "assert {(len(open('last.pt').read()), os.path.exists('last.pt')) for _ in range(9)} == {(5, True)}"
    )
    adds = "open(f'{k}.bin', 'a').write('+'); open(f'{k}.bin').read(4)"
    program = f"import os\nown = f'{{os.getpid()}}.new'\nfor k in range(400): {replaces}; {reads}; {adds}"
    start = f"started = [subprocess.Popen([sys.executable, '-c', {program!r}]) for _ in range(4)]"
    assert len(python(folder, start, "assert not any([p.wait() for p in started])").written) == 401
    assert [path.read_text() for path in folder.glob("files/*-*")].count("++++") == 400


def test_large_file_that_becomes_a_checkpoint_is_empty(folder: Path) -> None:
    large = "open('../large', 'wb').truncate((1 << 30) + 1); os.rename('../large', '../a.pt')"
    python(folder, large, "assert os.path.getsize('../a.pt') == 0")
    assert not Path("../a.pt").exists()


def test_new_files_are_found_by_all_processes_and_gone_afterwards(folder: Path) -> None:
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
assert Path("moved").read_text() == "old a"
Path("run.sh").write_text("#!/bin/sh\\necho ran")
os.chmod("run.sh", 0o700)
assert subprocess.check_output(["./run.sh"]) == b"ran\\n"
os.rename("out", "last")
os.makedirs(".new/x")
Path(".new/x/y").touch()
"""
    changes = python(folder, program)
    assert set(changes.written) == {"moved", "run.sh", "last/log", "last/data", ".new/x/y"}
    assert changes[1:] == (["old/a"], [])
    assert not new_files()


def test_folder_with_files_of_others_stays_after_a_rehearsal(folder: Path) -> None:
    Path(".cache").mkdir()
    program = """
os.makedirs("ours/empty")
os.makedirs("theirs/sub")
open("theirs/sub/ours.txt", "x").close()
Path(".cache/kept").write_text("kept")
Path("library.so").write_text("{}")
subprocess.run(["touch", "theirs/sub/theirs.txt"], env={"MEMPOOL_FILES": ""})
"""
    changes = python(folder, program)
    assert changes.left == [str(Path("theirs").absolute())]
    stay = {".cache/kept": "kept", "library.so": "{}", "theirs/sub/theirs.txt": ""}
    assert new_files() == stay | dict.fromkeys((".cache", "theirs", "theirs/sub"), "")


def test_outcome_of_a_program_in_a_folder_above_the_rehearsal_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMPOOL_CACHE", str(Path.cwd()))
    inside = Path("inside").absolute()
    inside.mkdir()
    python(inside, "Path('inside/outcome').write_text('1'); Path('new').touch()")
    assert Path("inside/outcome").read_text() == "1"
    assert not Path("new").exists()


def test_safetensors_of_any_framework_keep_an_older_file(folder: Path) -> None:
    pytest.importorskip("safetensors.torch", reason="PyTorch and safetensors are not both installed")
    program = """
from mempool.cli.run.child import AfterImport
from mempool.rehearsal import checkpoints
sys.meta_path.insert(0, AfterImport(lambda name: checkpoints.adjust(name, []), checkpoints.MODULES))
import numpy
from safetensors.numpy import load_file, save_file
import torch
from safetensors.torch import save_file as save_torch
for name in ("old/a", "new.safetensors"):
    save_torch({"x": torch.ones(3)}, name)
    save_file({"x": numpy.full(3, 2.0)}, name)
    assert load_file(name)["x"].sum() == 6
torch.save(torch.ones(3), "checkpoint")
large = torch.empty((1 << 30) + 1, dtype=torch.uint8, device="meta")
for save in (torch.save, lambda tensors, name: save_torch({"x": tensors}, name)):
    save(large, "large.tmp")
    os.replace("large.tmp", "large")
    assert os.path.getsize("large") == 0
"""
    assert set(python(folder, program).written) == {"old/a", "new.safetensors", "checkpoint", "large"}
    assert not new_files()

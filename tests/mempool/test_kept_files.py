"""Files older than a rehearsal stay unchanged, and each process sees its own changes."""

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
    return kept


def state() -> dict[str, object]:
    """Return times, modes and contents of all files."""
    found = {}
    for path in Path("old").rglob("*"):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and status.st_size < 1 << 20 else b""
        found[str(path)] = (status.st_mtime_ns, status.st_mode, content)
    return found


def kept(folder: Path, *command: str, code: int = 0) -> tuple[list[str], list[str]]:
    """Run a command that must not change older files; return those that it would have changed and removed."""
    before = state()
    # The clock of files is coarser than that of the rehearsal's beginning.
    began = max(Path(path).lstat().st_ctime_ns for path in before) + 1
    environment = os.environ | kept_files.environment(folder, began)
    assert subprocess.run(command, env=environment, check=False).returncode == code
    after = state()
    assert {path: after[path] for path in before} == before
    changes = kept_files.finish(folder)
    return changes.written, changes.not_removed


def python(folder: Path, *lines: str) -> tuple[list[str], list[str]]:
    imports = ("import os, shutil, sqlite3, subprocess", "from pathlib import Path")
    return kept(folder, sys.executable, "-c", "\n".join((*imports, *lines)))


@pytest.mark.parametrize(
    "line",
    [
        "Path('old/a').write_text('new')",
        "open(b'old/a', 'r+').write('n')",
        "open('old/a', 'a').write('n')",
        "os.write(os.open('old/a', os.O_WRONLY | os.O_TRUNC), b'n')",
        "os.write(os.open('a', os.O_RDWR, dir_fd=os.open('old', os.O_RDONLY)), b'n')",
        "os.truncate('old/a', 2)",
        "open(f\"/proc/self/fd/{os.open('old/a', os.O_RDONLY)}\", 'w').write('n')",
        "import numpy as np; np.memmap('old/a', 'u1', 'r+')[:] = 65",
        "import numpy as np; np.savez(open('old/a', 'wb'), x=np.ones(3))",
        "Path('fresh').write_text('n'); os.replace('fresh', 'old/a')",
        "shutil.copy('old/b', 'old/a')",
        "open('old/link', 'w').write('through a link')",
        "subprocess.run('echo new >> old/a', shell=True, check=True)",
        "subprocess.run(['sed', '-i', 's/old/new/', 'old/a'], check=True)",
        "subprocess.run(['bash', '-c', 'echo new > old/a'], env={'PATH': os.environ['PATH']}, check=True)",
        "os.posix_spawn('/bin/sh', ['sh', '-c', 'echo new > old/a'], {}); os.wait()",
    ],
)
def test_program_reads_written_content_of_a_file_that_stays_unchanged(folder: Path, line: str) -> None:
    seen = "assert Path('old/a').read_bytes() != b'old a' and os.stat('old/a').st_size != 0"
    again = "assert subprocess.check_output(['cat', 'old/a']) == Path('old/a').read_bytes()"
    written, removed = python(folder, line, seen, again)
    assert (written, removed) == (["old/a"], [])


@pytest.mark.parametrize(
    "line",
    [
        "os.remove('old/a')",
        "Path('old/a').rename('moved'); assert Path('moved').read_text() == 'old a'",
        "os.rename('old/a', 'old/b'); assert Path('old/b').read_text() == 'old a'",
        "shutil.move('old/a', 'moved')",
        "os.unlink('a', dir_fd=os.open('old', os.O_RDONLY))",
        "subprocess.run('mv old/a moved', shell=True, check=True)",
        "shutil.rmtree('old')",
        "os.rename('old', 'moved'); assert Path('moved/sub/x').read_text() == 'old x'",
        "shutil.move('old', 'moved'); assert os.readlink('moved/link') == 'a'",
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
    _, removed = python(folder, line, hidden, again, read)
    assert removed[0] in ("old", "old/a")


def test_times_modes_and_links_of_older_files_stay(folder: Path) -> None:
    lines = ["os.utime('old/a')", "os.chmod('old/a', 0o700)", "os.fchmod(os.open('old/b', 0), 0)"]
    lines += ["os.link('old/c', 'new')", "open('new', 'w').write('n')", "shutil.copystat('old/d', 'old/e')"]
    assert python(folder, *lines) == ([], [])


def test_older_link_stays_if_another_takes_its_name(folder: Path) -> None:
    made = "os.symlink('b', 'new'); os.replace('new', 'old/link'); assert not os.path.lexists('new')"
    again = "os.remove('old/link'); os.symlink('b', 'old/link'); assert os.readlink('old/link') == 'a'"
    assert python(folder, made, again) == ([], ["old/link"])


def test_database_and_new_files_are_written(folder: Path) -> None:
    make = "import sqlite3; c = sqlite3.connect('old/data'); c.execute('create table t (x)'); c.commit()"
    subprocess.run([sys.executable, "-c", make], check=True)
    insert = "c = sqlite3.connect('old/data'); c.execute('insert into t values (1)'); c.commit()"
    asked = "assert sqlite3.connect('old/data').execute('select * from t').fetchall() == [(1,)]"
    lines = ["Path('old/new').write_text('1')", "Path('old/new').write_text('2')"]
    assert python(folder, insert, asked, *lines, "os.rename('old/new', 'new')") == (["old/data"], [])
    assert Path("new").read_text() == "2"


def test_large_file_is_read_only(folder: Path) -> None:
    with Path("old/large").open("wb") as file:
        file.truncate((1 << 30) + 1)
    opened = "open('old/large', 'rb').read(1); open('old/large', 'r+b')"
    program = f"try: {opened}\nexcept OSError as error: raise SystemExit(error.errno)"
    assert kept(folder, sys.executable, "-c", program, code=30) == ([], [])

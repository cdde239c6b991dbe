"""``mempool run``: direct launch of a program, and programs with child processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import MEMPOOL, outcome, start, write
from hypothesis import example, given
from hypothesis import strategies as st

from mempool.cli.app import call
from mempool.cli.run import exec as launch
from traces.formats.parquet import read_trace


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
    "words", ["there.py", "-m there --x", "--quiet --json out -c pass", "--record t there.py"]
)
def test_plain_command_lines_go_straight(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts, modules and code, with flags and files."""
    (tmp_path / "there.py").touch()
    monkeypatch.chdir(tmp_path)
    assert started(lambda: launch.launch(words.split()), monkeypatch) is not None


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


FORKS = """
import os, signal, numpy
for generation in range(4):
    if os.fork():
        os.wait()
        break
    numpy.ones(99_999)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    os.write(1, b'%d ' % generation)
"""
TERMINATES = """
import multiprocessing, time, numpy
fork = multiprocessing.get_context('fork')
for _ in range(20):
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(60)
    print(child.exitcode)
    child.kill()
"""


@pytest.mark.parametrize("options", [["--quiet"], ["--quiet", "--children"]])
@pytest.mark.parametrize(("program", "printed"), [(FORKS, list("0123")), (TERMINATES, ["-15"] * 20)])
def test_child_forks_like_its_parent_and_ends_when_terminated(
    tmp_path: Path, program: str, printed: list[str], options: list[str]
) -> None:
    """Python forgets signals that arrive during the repair of a child's state after the fork."""
    write(tmp_path / "script.py", program)
    done = outcome(start(tmp_path, *MEMPOOL, *options, "script.py"))
    assert (done.status, done.stdout.split()) == (0, printed)
    assert program == TERMINATES or done.stderr == ""


CHILDREN = """
import multiprocessing, os, subprocess, sys
import numpy as np

def work(n):
    for _ in range(50):
        y = np.arange(140_000.0) * n
    return float(y.sum())

if __name__ == '__main__':
    if sys.argv[1] == 'subprocess':
        subprocess.run([sys.executable, '-c', 'import numpy; numpy.ones(99_999)'], check=True)
    elif sys.argv[1] == 'os.fork':
        if os.fork() == 0:
            work(1); sys.exit()
        os.wait()
    else:
        process = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(2,))
        process.start(); process.join()
    print(work(3))
"""


@pytest.mark.parametrize("way", ["spawn", "fork", "forkserver", "subprocess", "os.fork"])
def test_children_have_a_trace_of_their_own_only_on_request(tmp_path: Path, way: str) -> None:
    """With --children each allocating process writes one whole trace; without, only the first does."""
    write(tmp_path / "script.py", CHILDREN)
    alone = outcome(start(tmp_path, *MEMPOOL, "--record", "a.trace", "script.py", way))
    asked = outcome(start(tmp_path, *MEMPOOL, "--children", "--record", "b.trace", "script.py", way))
    assert alone.status == asked.status == 0, asked.stderr
    assert alone.stdout == asked.stdout
    assert [path.name for path in tmp_path.glob("a*")] == ["a.trace"]
    traces = list(tmp_path.glob("b*"))
    assert len(traces) >= 2
    assert all(len(read_trace(path)) for path in traces)
    assert alone.stderr.count("mempool: numpy") == 1
    assert not list(tmp_path.glob(".*"))


LAUNCHER = """
import subprocess, sys
{imported}
busy = "import time\\nwhile time.process_time() < {seconds}: pass"
subprocess.run([sys.executable, "-c", busy], check=True)
"""


@pytest.mark.parametrize(
    ("options", "imported", "seconds", "told"),
    [
        pytest.param([], "", 2, True, marks=pytest.mark.full),
        ([], "import numpy", 2, True),
        ([], "import numpy; x = numpy.ones(1 << 20)", 2, False),
        ([], "import numpy", 0, False),
        pytest.param(["--children"], "import numpy", 2, False, marks=pytest.mark.full),
        pytest.param(["--quiet"], "import numpy", 2, False, marks=pytest.mark.full),
    ],
)
def test_program_with_working_children_gets_a_hint_about_children(
    tmp_path: Path, options: list[str], imported: str, seconds: int, told: bool
) -> None:
    """Not a program with buffers of its own, and not for small helpers such as a call of a version."""
    write(tmp_path / "script.py", LAUNCHER.format(imported=imported, seconds=seconds))
    done = outcome(start(tmp_path, *MEMPOOL, *options, "script.py"))
    assert done.status == 0
    assert ("`mempool run --children`" in done.stderr) == told

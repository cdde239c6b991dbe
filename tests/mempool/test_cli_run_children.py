"""``mempool run`` of a program with child processes: with pools of their own, or without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from commands import MEMPOOL, outcome, start, write

from mempool.cli.run import child
from traces.formats.parquet import read_trace

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("options", [["--quiet"], ["--quiet", "--children"]])
def test_child_forks_like_its_parent(tmp_path: Path, options: list[str]) -> None:
    write(
        tmp_path / "script.py",
        "import os, signal, numpy\n"
        "for generation in range(4):\n"
        "    if os.fork():\n"
        "        os.wait()\n"
        "        break\n"
        "    numpy.ones(99_999)\n"
        "    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])\n"
        "    os.write(1, b'%d' % generation)\n",
    )
    done = outcome(start(tmp_path, *MEMPOOL, *options, "script.py"))
    assert (done.status, done.stdout, done.stderr) == (0, "0123", "")


@pytest.mark.parametrize("options", [["--quiet"], ["--quiet", "--children"]])
def test_child_terminated_while_being_forked_ends(tmp_path: Path, options: list[str]) -> None:
    """Python forgets signals that arrive during the repair of a child's state after the fork."""
    write(
        tmp_path / "script.py",
        "import multiprocessing, time, numpy\n"
        "fork = multiprocessing.get_context('fork')\n"
        "for _ in range(20):\n"
        "    child = fork.Process(target=time.sleep, args=(60,))\n"
        "    child.start()\n"
        "    child.terminate()\n"
        "    child.join(60)\n"
        "    print(child.exitcode)\n"
        "    child.kill()\n",
    )
    done = outcome(start(tmp_path, *MEMPOOL, *options, "script.py"))
    assert (done.status, done.stdout.split()) == (0, ["-15"] * 20)


CHILDREN = """
import multiprocessing, os, subprocess, sys
import numpy as np

def work(n):
    for _ in range(50):
        y = np.arange(40_000.0) * n
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
        ([], "", 2, True),
        ([], "import numpy", 2, True),
        ([], "import numpy; x = numpy.ones(1 << 20)", 2, False),
        ([], "import numpy", 0, False),
        (["--children"], "import numpy", 2, False),
        (["--quiet"], "import numpy", 2, False),
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


@pytest.mark.parametrize("ours", [True, False])
def test_compiler_started_by_the_pool_is_no_child_of_the_program(
    monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    seconds = iter([0.0, 1e6] if ours else [0.0, 0.0])
    monkeypatch.setattr(child, "_seconds_of_children", lambda: next(seconds, 1e6))
    monkeypatch.setattr(child.Run, "_install", lambda *_: None)
    run = child.Run({"children": False, "plan_is_of": ""})
    run.install("torch")
    assert run._children_did_it({}) != ours

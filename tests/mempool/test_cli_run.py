"""``mempool run`` against plain Python: the same program, the same output, the same end."""

from __future__ import annotations

import json
import shlex
import signal
import time
import zipfile
from pathlib import Path

import programs
import pytest
from commands import COMMAND, MEMPOOL, outcome, plain_and_pooled, start, write
from pools import run

from mempool import Pool
from mempool.planning.plan_files import SavedPlans, write_plans
from traces.formats.parquet import read_trace
from traces.trace import EventType

ITERATE = """
import numpy as np
x = np.arange(40_000.0)
for _ in range({count}):
    y = x * 2 + np.sqrt(x)
    z = y[::-1] @ x
print(repr(float(z)))
"""


PROGRAMS = {
    "arguments": "import sys; print(sys.argv, sys.orig_argv[1:])",
    "main": """
        import sys
        print(__name__, __file__, __spec__, __package__, __doc__, __cached__, __loader__.__class__)
        print(sys.path, vars(sys.modules["__main__"]) is globals(), sorted(globals()))
    """,
    "environment": "import os; print(sorted(os.environ.items()))",
    "no_sitecustomize": "import sitecustomize",
    "exit_number": "import sys; sys.exit(7)",
    "exit_text": "import sys; sys.exit('went wrong')",
    "exit_at_once": "import os; print('lost'); os._exit(4)",
    "exception": """
        def outer():
            inner()
        def inner():
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise ValueError('deep') from error
        outer()
    """,
    "exception_after_numpy": "import numpy as np; np.zeros(3).reshape(2, 2)",
    "syntax_error": "print(1\nif",
    "missing_import": "import numpy.no_such_module",
    "keyboard_interrupt_after_numpy": "import numpy; raise KeyboardInterrupt",
    "at_exit": """
        import atexit, sys
        atexit.register(print, 'first', file=sys.stderr)
        atexit.register(lambda: 1 / 0)
        print('body')
    """,
    "thread_exception": """
        import threading
        thread = threading.Thread(target=lambda: [][1], name='worker')
        thread.start(); thread.join()
    """,
    "threads_wait": """
        import threading, time
        threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()
        print('main is done')
    """,
    "input": "print(input()[::-1]); import sys; print(sys.stdin.read())",
    "closed_streams": "import sys; sys.stdout.close(); sys.stderr = None",
    "pickle": """
        import pickle
        class Point:
            def __init__(self, x): self.x = x
        data = pickle.dumps(Point(3))
        print(data, pickle.loads(data).x, Point.__module__)
    """,
    "warnings": "import warnings; warnings.warn('mind this')",
    "subprocess": """
        import subprocess, sys
        code = "import sys, os; print(sys.path[1:], sorted(os.environ), sorted(sys.modules))"
        print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True))
    """,
    "numpy": ITERATE.format(count=200),
    "numpy_spec": """
        import importlib.util, sys
        print(importlib.util.find_spec('numpy').name, 'numpy' in sys.modules)
        import numpy
        print(numpy.__spec__, numpy.__loader__, numpy.__spec__.loader is numpy.__loader__)
        print(importlib.reload(numpy) is numpy)
    """,
    "numpy_in_a_thread": """
        import threading
        def work():
            import numpy
            print(numpy.ones(10_000).sum())
        thread = threading.Thread(target=work); thread.start(); thread.join()
    """,
    "fork": """
        import os, sys, warnings
        import numpy as np
        x = np.arange(100_000.0)
        # From 3.12 on Python warns of a fork beside any thread, and the planner is one.
        warnings.simplefilter('ignore', DeprecationWarning)
        pid = os.fork()
        y = x + 1
        if pid == 0:
            print('child', y.sum()); sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), y.sum())
    """,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_behaves_as_under_plain_python(tmp_path: Path, program: str) -> None:
    """Output, errors and exit status of a script are Python's own, to the byte."""
    write(tmp_path / "script.py", PROGRAMS[program])
    plain, pooled = plain_and_pooled(tmp_path, "script.py", "-m", "--json", "x y", given="one\ntwo\n")
    assert pooled == plain


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing_is_as_under_plain_python(tmp_path: Path, method: str) -> None:
    """Functions and classes of ``__main__`` reach worker processes, and their results come back."""
    program = """
        import multiprocessing, sys
        import numpy as np

        class Job:
            def __init__(self, n): self.n = n

        def work(job):
            return __name__, float(np.arange(job.n * 10_000.0).sum())

        if __name__ == '__main__':
            with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
                print(pool.map(work, [Job(n) for n in range(5)]))
    """
    write(tmp_path / "script.py", program)
    plain, pooled = plain_and_pooled(tmp_path, "script.py", method)
    assert pooled == plain
    assert plain.status == 0


def test_modules_code_folders_archives_and_stdin_run_as_under_plain_python(tmp_path: Path) -> None:
    """Entry points ``-m``, ``-c``, a folder, a zip file and ``-`` run as Python runs them."""
    show = "import sys; print(__name__, __spec__ and __spec__.name, __package__, sys.argv, sys.path[0])\n"
    write(tmp_path / "package" / "__init__.py", "")
    write(tmp_path / "package" / "__main__.py", "from . import part\n" + show)
    write(tmp_path / "package" / "part.py", show)
    write(tmp_path / "package" / "interrupted.py", "import numpy; raise KeyboardInterrupt")
    with zipfile.ZipFile(tmp_path / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", show)
    for command in (
        ("-m", "package", "--record", "x"),
        ("-m", "package.part", "-h"),
        ("-mpackage.part",),
        ("-m", "no_such_module"),
        ("-m", "package.interrupted"),
        ("-c", "import numpy; raise KeyboardInterrupt"),
        ("-c", show, "-q"),
        ("package", "a"),
        ("archive.zip", "a"),
        ("-", "a"),
    ):
        plain, pooled = plain_and_pooled(tmp_path, *command, given=show)
        assert pooled == plain, command


def test_failing_import_under_numpy_shows_no_frame_of_mempool(tmp_path: Path) -> None:
    """A broken file named numpy.py gives the same traceback as without the pool."""
    write(tmp_path / "script.py", "import numpy")
    for broken in ("1 / 0", "import no_such_module", "def"):
        write(tmp_path / "numpy.py", broken)
        plain, pooled = plain_and_pooled(tmp_path, "script.py")
        assert pooled == plain, broken


def test_sitecustomize_and_interpreter_flags_of_the_user_are_kept(tmp_path: Path) -> None:
    """The command is a Python process, so a sitecustomize on PYTHONPATH runs in it too."""
    write(tmp_path / "site" / "sitecustomize.py", "print('custom')")
    write(
        tmp_path / "script.py",
        """
        import os, sys, warnings
        print(os.environ['PYTHONPATH'], sys.path, sys.modules['sitecustomize'], sys.flags.optimize, __debug__)
        warnings.warn('x')
        """,
    )
    for flags in (("-O", "-W", "error"), ("-OW", "error"), ("--check-hash-based-pycs", "always", "-Werror")):
        plain, pooled = plain_and_pooled(
            tmp_path, "script.py", flags=flags, PYTHONPATH=str(tmp_path / "site")
        )
        assert pooled.stdout == "custom\n" + plain.stdout
        assert (pooled.stderr, pooled.status) == (plain.stderr, plain.status)
        assert plain.status == 1


SLEEPER = """
import signal, sys, time
{setup}
try:
    print('ready', flush=True)
    while True:
        time.sleep(0.05)
finally:
    print('finally', flush=True)
"""
HANDLERS = {
    "default": "",
    "own": "signal.signal(signal.{name}, lambda *_: sys.exit('own handler'))",
    "ignored": "signal.signal(signal.{name}, signal.SIG_IGN); signal.alarm(1)",
    "reset": "signal.signal(signal.{name}, signal.SIG_DFL)",
    "numpy": "import numpy",
}


def test_unused_plan_limit_and_framework_are_reported(tmp_path: Path) -> None:
    """No error, since the program may use the framework another time."""
    with Pool(background=False) as pool:
        run(pool, lambda _: programs.layers(programs.Watched(pool)), 8, marks=True)
        assert pool.planned is not None
        write_plans(SavedPlans([pool.planned], client="torch"), tmp_path / "plan")
    write(tmp_path / "script.py", "import numpy; numpy.ones(1 << 20)")
    write(tmp_path / "none.py", "import sys; print('numpy' in sys.modules, 'mempool' in sys.modules)")
    for command, said in (
        ("--plan plan script.py", "the plan was not used: it is of torch"),
        ("--limit 1MiB script.py", "nothing was held within the limit"),
        ("--max-reserved 1GiB script.py", "mempool: numpy: no plan: nothing was seen to repeat"),
        ("--report script.py", "  reserved at most "),
        ("--explain script.py", "no plan in effect: recording"),
        ("none.py", "nothing to report: the program imported none of numpy, torch"),
        ("none.py --limit=1 --limit --own", "mempool: --limit went to the program"),
        ("-c 'import numpy'", "nothing to report: numpy never had 1 MiB in use"),
    ):
        done = outcome(start(tmp_path, *MEMPOOL, *shlex.split(command)))
        assert (done.status, done.stdout) == (0, "False False\n" if command.startswith("none.py") else "")
        assert said in done.stderr
        assert done.stderr.count("\n") == 1 + ("--limit" in command or "--plan" in command) or said[0] != "m"
        assert ("within the limit" in done.stderr) == command.startswith("--limit")


def sleeps(pid: int) -> bool:
    """Return whether a process sleeps, rather than waiting for a processor."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "R"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
@pytest.mark.parametrize("handler", HANDLERS)
def test_signals_end_a_program_as_under_plain_python(tmp_path: Path, name: str, handler: str) -> None:
    """A signal kills, interrupts or is handled as without us, and the parent sees the same status."""
    write(tmp_path / "script.py", SLEEPER.format(setup=HANDLERS[handler].format(name=name)))
    processes = [start(tmp_path, *command, "script.py") for command in ((), (*MEMPOOL, "--quiet"))]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)  # until they sleep
    for process in processes:
        while not sleeps(process.pid):  # a busy machine may have left it where it said that it was ready
            time.sleep(0.01)
        process.send_signal(getattr(signal, name))
    plain, pooled = map(outcome, processes)
    assert pooled == plain


KILLED = "import os, signal, time; os.kill(os.getpid(), signal.{}); time.sleep(60)"
#: The end of a program, and its exit status.
ENDINGS = {
    "": 0,
    "import sys; sys.exit(5)": 5,
    "raise RuntimeError": 1,
    KILLED.format("SIGTERM"): -15,
    KILLED.format("SIGHUP"): -1,
    KILLED.format("SIGINT"): -2,
    """
import os, signal, threading
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
while True: x * 2
""": -15,
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_recorded_trace_is_whole_for_every_ending_of_the_program(tmp_path: Path, ending: str) -> None:
    """The trace has every allocation, the exit status is the program's, and no other file is left."""
    write(tmp_path / "script.py", ITERATE.format(count=300) + ending)
    done = outcome(start(tmp_path, *MEMPOOL, "--record", "t.trace", "--json", "r.json", "script.py"))
    assert done.status == ENDINGS[ending], done.stderr
    trace = read_trace(tmp_path / "t.trace")
    assert (trace.kind == EventType.ALLOC).sum() >= 900
    assert "mempool: numpy" in done.stderr
    report = json.loads((tmp_path / "r.json").read_text())["pools"]["numpy"]
    assert report["allocations"] >= 900
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "script.py", "t.trace"]


def test_second_signal_does_not_truncate_the_trace(tmp_path: Path) -> None:
    """After two SIGTERMs at once, the trace is whole and the status is that of SIGTERM."""
    write(tmp_path / "script.py", ITERATE.format(count=3000) + SLEEPER.format(setup=""))
    process = start(tmp_path, *MEMPOOL, "--record", "t.trace", "script.py")
    assert process.stdout is not None
    while process.stdout.readline() != "ready\n":
        pass
    process.send_signal(signal.SIGTERM)
    time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert outcome(process).status == -15
    assert len(read_trace(tmp_path / "t.trace")) > 9000


def test_full_disk_is_reported_in_a_single_line(tmp_path: Path) -> None:
    """The program goes on; a limit on the file size stands in for the full disk."""
    write(
        tmp_path / "script.py",
        """
        import resource, signal, numpy as np
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        for _ in range(600_000): np.ones(100)
        print("done")
        """,
    )
    told = outcome(start(tmp_path, *MEMPOOL, "--quiet", "--record", "t.trace", "script.py"))
    assert (told.stdout, told.status) == ("done\n", 0)
    assert "t.trace" in told.stderr
    assert told.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_report_describes_the_pool_at_the_end_of_the_program(tmp_path: Path) -> None:
    """A program without a loop leaves an open pool, which still serves the exit handlers."""
    program = """
        import atexit
        import numpy as np
        atexit.register(lambda: print(mempool.numpy.installed() is not None))
        import mempool.numpy
        x = np.ones(50_000)
    """
    write(tmp_path / "script.py", program)
    done = outcome(start(tmp_path, *MEMPOOL, "--json", "r.json", "script.py"))
    assert done.status == 0, done.stderr
    assert done.stdout == "True\n"
    assert json.loads((tmp_path / "r.json").read_text())["pools"]["numpy"]["state"] == "recording"


@pytest.mark.parametrize("name", ["traces", "solvers.packing.streams", "mempool.planning.learner"])
def test_program_may_import_mempool_before_the_framework(tmp_path: Path, name: str) -> None:
    """A pool is useless while the necessary modules are being imported."""
    write(tmp_path / "script.py", f"import {name}\nimport numpy as np\nx = np.ones(50_000)")
    done = outcome(start(tmp_path, *MEMPOOL, "--quiet", "--json", "r.json", "script.py"))
    assert (done.status, done.stderr) == (0, "")
    assert json.loads((tmp_path / "r.json").read_text())["pools"]["numpy"]["allocations"]


@pytest.mark.parametrize("name", ["traces", "solvers"])
@pytest.mark.parametrize("beside", ["script", "data", "clone"])
def test_files_with_names_of_our_packages_are_no_obstacle(tmp_path: Path, name: str, beside: str) -> None:
    """A script of such a name, a folder of data, and our own sources without their native modules."""
    script = f"{name}.py" if beside == "script" else "script.py"
    write(tmp_path / script, ITERATE.format(count=100))
    if beside == "data":
        write(tmp_path / name / "data.csv", "")
    if beside == "clone":
        write(tmp_path / name / "__init__.py", "raise SystemExit('the wrong one')")
        write(tmp_path / name / "_mempool_sibling", "")
    done = outcome(start(tmp_path, *MEMPOOL, "--record", "t", "--json", "r.json", script))
    assert done.status == 0, done.stderr
    assert "no pool" not in done.stderr
    assert "numpy" in json.loads((tmp_path / "r.json").read_text())["pools"]
    assert len(read_trace(tmp_path / "t"))


def test_recorded_plan_serves_the_next_run(tmp_path: Path) -> None:
    """record, plan, run --plan: the results stay, and the plan is in effect from the first iterations."""
    write(tmp_path / "script.py", ITERATE.format(count=400))
    first = outcome(start(tmp_path, *MEMPOOL, "--record", "t.trace", "script.py"))
    planned = outcome(start(tmp_path, COMMAND, "plan", "t.trace", "-o", "t.plan"))
    assert planned.status == 0, planned.stderr
    again = outcome(start(tmp_path, *MEMPOOL, "--plan", "t.plan", "--json", "r.json", "script.py"))
    assert again.status == 0, again.stderr
    assert again.stdout == first.stdout
    report = json.loads((tmp_path / "r.json").read_text())["pools"]["numpy"]
    assert report["state"] == "replaying"

"""Test scripts that run in separate processes and report their results."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

#: Last line of a process that has run its test.
_RAN = "ran\n"


def json_output_of(script: Path, *arguments: str) -> dict[str, Any]:
    """Return the JSON object of a script's last line; assert that the script succeeds."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def alone(test: Callable[..., None]) -> Callable[[pytest.FixtureRequest], None]:
    """Run a test in a separate process, since its effects on the process cannot be undone.

    Its fixtures and parameters come to it as text. It must end well and say nothing on stderr, warnings
    included. Its file ends with ``run_each_alone(globals())`` for the case that it is the program, which
    forks for each test.
    """

    @functools.wraps(test)
    def in_a_process(request: pytest.FixtureRequest, **given: Any) -> None:
        fixtures = {name: str(value) for name, value in given.items()}
        server: subprocess.Popen[str] = request.getfixturevalue("forking_process")
        folder: Path = request.getfixturevalue("tmp_path")
        assert server.stdin
        assert server.stdout
        print(json.dumps([test.__name__, fixtures, str(folder)]), file=server.stdin, flush=True)
        code = int(server.stdout.readline())
        stderr = (folder / "stderr").read_text()
        assert (code, stderr) == (0, ""), f"{code} {stderr[-3000:]}"
        assert (folder / "stdout").read_text().endswith(_RAN)

    signature = inspect.signature(test)
    request = inspect.Parameter("request", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    in_a_process.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[request, *signature.parameters.values()]
    )
    in_a_process.alone = test  # type: ignore[attr-defined]
    return in_a_process


@contextlib.contextmanager
def forking(file: Path, *, startup: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start a process that imports a test file and forks for each of its tests.

    Args:
        file: the test file.
        startup: first folder of the module path.
    """
    folders = [str(folder) for folder in (startup, Path(__file__).parent) if folder is not None]
    folders += filter(None, [os.environ.get("PYTHONPATH")])  # of modules that a sanitizer watches
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "-W", "error", str(file)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as server:
        yield server


def run_each_alone(tests: dict[str, Any]) -> None:
    """Fork a process for each test that stdin names, and print its exit code."""
    gc.collect()
    gc.freeze()  # or the end of each process would go through all of PyTorch, which takes half a second
    for line in sys.stdin:
        name, fixtures, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, path in enumerate((os.devnull, f"{folder}/stdout", f"{folder}/stderr")):
                os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
            tests[name].alone(**fixtures)
            sys.stdout.write(_RAN)
            return
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)

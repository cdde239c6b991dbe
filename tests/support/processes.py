"""Scripts of the tests that run in processes of their own and say what came out."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


#: What a process says last that has run its test.
_RAN = "ran\n"


def told_by(script: Path, *arguments: str) -> dict[str, Any]:
    """The JSON object of a script's last line; the script must end well."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments], capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def alone(test: Callable[..., None]) -> Callable[[pytest.FixtureRequest], None]:
    """A test that runs in a process of its own, since what it does to that cannot be undone.

    Its fixtures come to it as text. It must end well and say nothing on stderr, warnings included. Its file
    ends with ``run_one_alone(globals())`` for the case that it is the program.
    """
    names = list(inspect.signature(test).parameters)

    @functools.wraps(test)
    def in_a_process(request: pytest.FixtureRequest) -> None:
        fixtures = {name: str(request.getfixturevalue(name)) for name in names}
        done = subprocess.run(
            [sys.executable, "-W", "error", inspect.getfile(test), test.__name__, json.dumps(fixtures)],
            capture_output=True,
            text=True,
            timeout=280,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stderr[-3000:]
        assert done.stdout.endswith(_RAN), (
            f"{inspect.getfile(test)} does not end with run_one_alone(globals())"
        )

    del in_a_process.__wrapped__  # type: ignore[attr-defined]  # pytest would look for its fixtures
    in_a_process.alone = test  # type: ignore[attr-defined]
    return in_a_process


def run_one_alone(tests: dict[str, Any]) -> None:
    """In the process of its own: the test that the arguments name."""
    tests[sys.argv[1]].alone(**json.loads(sys.argv[2]))
    sys.stdout.write(_RAN)

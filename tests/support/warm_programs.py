"""Processes for ``mempool fit --main`` that are forked from one in which PyTorch is imported already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mempool.torch.estimate.program.run import ENVIRONMENT

#: Reads a folder and a request a line, and prints the exit code of the request's process.
SERVER = """
import gc, json, os, sys
from torch._subclasses.fake_tensor import FakeTensorMode
from mempool.torch.estimate.program.child import main
FakeTensorMode()  # imports the rest of PyTorch that a program needs
gc.collect()
gc.freeze()
for line in sys.stdin:
    folder, request = json.loads(line)
    process = os.fork()
    if not process:
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = open(0, closefd=False)
        os.chdir(folder)
        main(*request)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class WarmPrograms:
    """Stand-in for `start_process`: saves the seconds in which each process imports PyTorch."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-c", SERVER],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, request: Sequence[str], _: Path) -> WarmPrograms:
        assert self._server.stdin is not None
        print(json.dumps([str(Path.cwd()), request]), file=self._server.stdin, flush=True)
        return self

    def wait(self) -> int:
        """Wait for the process of the last request, and return its exit code."""
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())

    def kill(self) -> None:
        """End the server."""
        self._server.kill()
        self._server.communicate()

"""Tests on the stand-in for CUDA, each in a separate process with the settings of the test."""

from __future__ import annotations

import ctypes
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from typing import Any


class Cuda:
    """The stand-in as a library."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def code(self, function: str, *arguments: Any) -> int:
        """Call a function that returns a status. Integers are passed with 64 bits, outputs by reference."""
        return getattr(self.library, function)(
            *(ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments)
        )

    def get(
        self, function: str, *arguments: Any, kind: type[Any] = ctypes.c_uint64, first: bool = True
    ) -> Any:
        """Return the output of a function, its first or last argument; the function must succeed."""
        into = kind()
        outputs = (ctypes.byref(into),)
        code = self.code(function, *(outputs + arguments if first else arguments + outputs))
        assert code == 0, f"{function} returns {code}"
        return into.value

    def do(self, function: str, *arguments: Any) -> None:
        """Call a function that must succeed."""
        assert (code := self.code(function, *arguments)) == 0, f"{function} returns {code}"

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the current device."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.do("cudaMemGetInfo", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def read(self, address: int, bytes_: int) -> bytes:
        """Return the bytes that arrive from the device in a buffer of 0xff."""
        into = ctypes.create_string_buffer(b"\xff" * bytes_, bytes_)
        self.do("cudaMemcpy", into, address, bytes_, 2)
        return into.raw

    def faults(self) -> list[str]:
        text, found = ctypes.create_string_buffer(200), []
        for index in range(self.library.fake_faults()):
            self.library.fake_fault(ctypes.c_size_t(index), text, ctypes.c_size_t(200))
            found.append(text.value.decode())
        return found


def child(settings: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run Python with settings of the stand-in."""
    return subprocess.run(
        [sys.executable, "-S", *command],
        env=os.environ | {"MEMPOOL_STANDIN": settings},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def on_standin(settings: str = "") -> Callable[[Callable[[Cuda], None]], Callable[[], None]]:
    """Make a test of a function that uses the stand-in with these settings."""

    def decorate(function: Callable[[Cuda], None]) -> Callable[[], None]:
        def test() -> None:
            from mempool.rehearsal.standin import LIBRARY

            file = function.__code__.co_filename
            done = child(settings, __file__, str(LIBRARY), file, function.__name__)
            assert (done.returncode, done.stderr) == (0, ""), done.stderr

        test.program = function  # type: ignore[attr-defined]
        test.__doc__ = function.__doc__
        return test

    return decorate


if __name__ == "__main__":
    library, file, name = sys.argv[1:]
    runpy.run_path(file)[name].program(Cuda(library))

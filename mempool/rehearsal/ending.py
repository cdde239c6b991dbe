"""End of a rehearsed program, as an exception."""

from __future__ import annotations

import ctypes
import threading

_PATIENCE_SECONDS = 1.0  #: time to wait for the next operation, which rarely takes milliseconds


class RehearsalEnd(SystemExit):
    """End of the program after its last step. Programs that catch `Exception` do not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


class Ending:
    """End of a program at a time, in its main thread.

    The exception is raised by `check`, which the main thread calls where operations begin. If it begins none,
    the exception is raised wherever the thread is. During an operation that may be Python code that PyTorch's
    C++ code calls and that must not raise: a callback of a weak reference, for example, ignores exceptions.
    """

    def __init__(self) -> None:
        self._requested = False
        self._raised = threading.Event()

    def check(self) -> None:
        """Raise the end of the program once, if it was requested and this is the main thread."""
        if self._requested and threading.current_thread() is threading.main_thread():
            self._requested = False
            self._raised.set()
            raise RehearsalEnd

    def request(self) -> None:
        """Let the main thread raise the end of the program."""
        self._requested = True
        if not self._raised.wait(_PATIENCE_SECONDS):
            self._requested = False
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(RehearsalEnd))

"""A process that looks and plans for one planner, at no cost to the program's memory and its interpreter.

It is started when the planner is, and ended when nothing has been asked of it for some seconds, when the
planner stops, or with the program. Where it cannot be had, or is lost, the work is done by who asked.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from mempool.budget import cost_of_thread
from mempool.logs import log

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

T = TypeVar("T")

#: It is kept for so long after the last answer.
IDLE_SECONDS = 3.0
#: On a busy machine it may not be ready for so long; what is asked meanwhile is done by who asks.
START_SECONDS = 0.5
#: If nothing is asked for so much longer, it is ended, ready or not.
MOST_START_SECONDS = 10.0
#: Between two looks at whether it is still there, for the case that a forked child keeps its pipe open.
SECONDS_BETWEEN_LOOKS = 0.5
#: What is called there, and what the answers are made of.
NEEDED = ("traces.pattern", "solvers.streams", "mempool.planned", "mempool.recording")
#: Its answers do not go where it prints.
_CODE = """
import os, pickle, sys
answers = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
sys.path[:] = pickle.load(sys.stdin.buffer)
from mempool.planning_process import serve
serve(sys.stdin.buffer, answers)
"""
#: Numerical libraries would start threads, whose stacks are memory too.
_ONE_THREAD = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
#: A nice value. Above that, on a busy machine, a hundredth of a second's work takes seconds.
PRIORITY = 5

_running: set[PlanningProcess] = set()


def _leave_to_the_parent() -> None:
    """A forked child has the pipes too, and would keep them open."""
    for process in _running:
        process.forget()
    _running.clear()


os.register_at_fork(after_in_child=_leave_to_the_parent)


class PlanningProcess:
    """One planner's. All but `ask`, `cost` and `end` is for the planner's thread.

    Attributes:
        seconds: of processor time that answers took there, and every start but the first: what that imports
            is imported for the program, too.
    """

    def __init__(self, *, interrupt: Callable[[], bool], wanted: bool = True) -> None:
        """Nothing runs yet.

        Args:
            interrupt: asked now and then whether to stop.
            wanted: False: all is done by who asks.
        """
        self._interrupt = interrupt
        self._thread: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._may_be_had = wanted and bool(sys.executable) and not getattr(sys, "frozen", False)
        self._ready = self._has_been_ready = False
        self._ready_at = 0.0  # from then on nobody waits for it
        self._idle_at = 0.0
        self.seconds = 0.0

    @property
    def pid(self) -> int | None:
        """Of the process; None: there is none."""
        return None if self._child is None else self._child.pid

    @property
    def is_ready(self) -> bool:
        """Whether it waits for questions, or works."""
        return self._child is not None and self._ready

    def begin(self, *, soon: bool = True) -> None:
        """Work for the calling thread; ``soon``: start now, and wait until it is ready."""
        self._thread = threading.get_ident()
        if self._may_be_had:
            # The program may have chosen to be ended by the signal that a broken pipe is.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
        if soon:
            self._is_there()

    def cost(self) -> float:
        """Seconds of processor time that the calling thread has cost so far, with what was done for it."""
        return cost_of_thread() + self.seconds

    def _is_there(self) -> bool:
        """Start it if it does not run, and give it some time to get ready; whether it is."""
        try:
            if self._child is None and self._may_be_had:
                self._start()
            if self._child is not None and not self._ready and not self._interrupt():
                self._greet()
        except Exception:  # a sandbox, no memory: whatever it is, the work can be done here
            self._lose()
        if self._interrupt():
            self.drop()
        return self.is_ready

    def _start(self) -> None:
        self._ready = False
        self._ready_at = time.monotonic() + START_SECONDS
        self._idle_at = time.monotonic() + IDLE_SECONDS + MOST_START_SECONDS
        self._child = _started()
        _running.add(self)
        if not self._interrupt():  # `end` finds the child from now on
            self._send(sys.path)

    def _greet(self) -> None:
        """Hear that it is ready, if it is in time."""
        if self._has_news(self._ready_at - time.monotonic()):
            seconds, _ = self._received()
            self._ready = True
            self.seconds += seconds if self._has_been_ready else 0.0
            self._has_been_ready = True

    def ask(
        self,
        call: Callable[..., T],
        *arguments: object,
        interrupt: Callable[[], bool] | None = None,
        **options: object,
    ) -> T:
        """What a function of ours gives, called there; by another thread, or without the process, here.

        Function, arguments and result are pickled; nobody else has a say in what is.

        Args:
            call: is given an `interrupt`, too.
            arguments: of the call.
            interrupt: instead of this one's, where the call is made here: only that takes the program's time.
            options: of the call.

        Raises:
            Exception: what the function raises.
        """
        if threading.get_ident() == self._thread and not self._interrupt() and self._is_there():
            try:
                self._send((call, arguments, options))
                answer: T
                seconds, answer = self._received()
                self.seconds += seconds
                return answer
            except Exception:  # it failed, or is gone: who asked finds out by itself what there is to know
                self._lose()
        return call(*arguments, interrupt=interrupt or self._interrupt, **options)

    def idle_in(self) -> float | None:
        """Seconds until it has been idle for long; None: there is none."""
        return None if self._child is None else self._idle_at - time.monotonic()

    def drop_if_idle(self) -> None:
        """End it if nothing has been asked of it for long; the next question starts another."""
        if self._child is not None and time.monotonic() >= self._idle_at:
            self.drop()

    def drop(self) -> None:
        """End it; the next question starts another."""
        child, self._child = self._child, None
        _running.discard(self)
        if child is not None:
            _kill(child)
            _close(child)

    def end(self) -> None:
        """End it at once, whoever waits for it; from now on `interrupt` is true. For any thread."""
        child = self._child
        if child is not None:
            _kill(child)  # its pipes may be in use

    def forget(self) -> None:
        """In a forked child, of whose processes it is none."""
        child, self._child = self._child, None
        if child is not None:
            child.returncode = 0
            _close(child)

    def _send(self, what: object) -> None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        pickle.dump(what, _Whole(child.stdin.fileno()), 5)

    def _has_news(self, seconds: float) -> bool:
        """Whether it says something, or is gone, after that time at most."""
        child = self._child
        assert child is not None
        assert child.stdout is not None
        news = select.poll()
        news.register(child.stdout, select.POLLIN)
        return bool(news.poll(1000 * max(seconds, 0.0)))

    def _received(self) -> tuple[float, Any]:
        """Seconds of processor time that it took there, and the answer."""
        child = self._child
        assert child is not None
        assert child.stdout is not None
        while not self._has_news(SECONDS_BETWEEN_LOOKS):
            if child.poll() is not None:
                raise EOFError
        received: tuple[float, Any] = pickle.load(child.stdout)  # noqa: S301 - of our own code
        self._idle_at = time.monotonic() + IDLE_SECONDS
        return received

    def _lose(self) -> None:
        """It does not do what it should: there will be no other."""
        if not self._interrupt():
            log.info("the planning process is lost; planning goes on in the program")
        self._may_be_had = False
        self.drop()


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        child.kill()
        child.wait(1.0)


def _close(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


class _Whole:
    """Writes all of it, and keeps nothing that a forked child could write once more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        size = len(left)
        while len(left):
            left = left[os.write(self._descriptor, left) :]
        return size


def _started() -> subprocess.Popen[bytes]:
    # What was loaded before the program, and settings of ours, are not for this process.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MEMPOOL", "LD_PRELOAD"))
    }
    flags = ["-I", *(["-B"] if sys.dont_write_bytecode else [])]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, *flags, "-c", _CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,  # an interrupt from the keyboard is for the program
        env=environment | dict.fromkeys(_ONE_THREAD, "1"),
    )


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """In the process: answer until there is nobody who could ask, and end at an error."""
    for module in NEEDED:
        importlib.import_module(module)
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(PRIORITY, os.getpriority(os.PRIO_PROCESS, 0)))
    there = select.poll()
    there.register(questions, 0)
    told, result = 0.0, None  # that it is ready
    while True:
        now = time.process_time()
        pickle.dump((now - told, result), answers, 5)
        answers.flush()
        told = now
        try:
            call, arguments, options = pickle.load(questions)  # noqa: S301 - of our own code
        except EOFError:
            return
        result = call(*arguments, interrupt=lambda: bool(there.poll(0)), **options)

"""What tests ask of a planner's process: functions that can be told by name in another process."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING

from solvers import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable


def until(done: Callable[[], bool], then: Callable[[], None] = lambda: None) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        then()
        time.sleep(0.001)


def where(*, interrupt: Callable[[], bool]) -> int:
    assert not interrupt()
    return os.getpid()


def dies_elsewhere(here: int, *, interrupt: Callable[[], bool]) -> int:
    assert not interrupt()
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def never_ends_elsewhere(here: int, *, interrupt: Callable[[], bool]) -> bool:
    while os.getpid() != here:
        time.sleep(0.01)
    return interrupt()


def refuses(*, interrupt: Callable[[], bool]) -> None:
    assert not interrupt()
    raise PlanError("no")


def works(seconds: float, *, interrupt: Callable[[], bool]) -> None:
    assert not interrupt()
    begun = time.process_time()
    while time.process_time() - begun < seconds:
        pass


def surroundings(*, interrupt: Callable[[], bool]) -> tuple[dict[str, str], set[str], int, int]:
    assert not interrupt()
    return dict(os.environ), set(sys.modules), os.getpgrp(), os.nice(0)

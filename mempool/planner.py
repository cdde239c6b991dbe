"""Looks at the recording, makes plans, hands them to the core. Runs beside the program, never on its path."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

from mempool import _core

if TYPE_CHECKING:
    from collections.abc import Callable

    from mempool.planned import Planned
    from traces.pattern import Pattern

log = logging.getLogger("mempool")

#: Free segments kept while the program has shown no iteration: none at first, since nobody knows what will stay.
LOOKS_BEFORE_CACHING = 6
#: With marks, how many iterations to wait for the frees of buffers that outlive theirs.
PATIENT_ITERATIONS = 5
#: So many iterations in a row with a miss mean that the pattern has changed.
SPOILT_ITERATIONS = 3
_LEAST_CACHE = 32 << 20


def cache_bytes(planned: Planned) -> int:
    """Free segments to keep for what does not follow the plan."""
    return max(_LEAST_CACHE, planned.plan.arena_bytes // 8)


class Planner:
    """One client's planner.

    Attributes:
        planned: the plan made last, or None.
        plans: how many were made.
    """

    def __init__(
        self,
        core: _core.Pool,
        client: _core.Client,
        *,
        small_bytes: int,
        alignment: int,
        drain: Callable[[], None] | None = None,
    ) -> None:
        self._core, self._client = core, client
        self._small_bytes, self._alignment = small_bytes, alignment
        self._drain = drain
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._pid = os.getpid()
        self._vain = 0
        self._resume_at = 0
        self._looked_again = 0
        self.planned: Planned | None = None
        self.plans = 0

    def begin(self, loaded: Planned | None = None) -> None:
        """Begin recording; whoever calls `look` plans. A loaded plan replays already."""
        self.planned = loaded
        self._client.set_recording(True)
        self._core.set_retained_limit(0 if loaded is None else cache_bytes(loaded))

    def start(self, loaded: Planned | None = None) -> None:
        """Begin recording, and plan in a thread of low priority."""
        self.begin(loaded)
        self.start_draining()

    def start_draining(self) -> None:
        """Start the thread, which writes the trace file out if there is one."""
        self._thread = threading.Thread(target=self._run, name="mempool-planner", daemon=True)
        self._thread.start()

    def forget(self) -> None:
        """Begin again with an empty recording."""
        self.planned = None
        self._client.set_recording(False)
        self._client.set_recording(True)

    def stop(self, seconds: float = 2.0) -> None:
        """End the thread; a solve that runs is interrupted."""
        self._stop.set()
        self._client.wake()
        if self._thread is not None and self._pid == os.getpid() and self._thread.is_alive():
            self._thread.join(seconds)
        self._thread = None

    def _run(self) -> None:
        _core.bypass_this_thread()
        # What planning needs is imported now, so that it does not delay the first plan.
        import mempool.planned
        import solvers.solve
        import traces.pattern  # noqa: F401

        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        except OSError:  # a sandbox that forbids it; the solver is brief
            pass
        while not self._stop.is_set():
            work = self._client.wait_for_work(0.25)
            if self._stop.is_set():
                return
            try:
                if self._drain is not None:
                    self._drain()
                if work:
                    self._idle.clear()
                    self.look()
                else:
                    self._perhaps_resume()
            except Exception:
                log.exception("the planner failed; the pool goes on without a new plan")
                self._client.set_recording(False)
            self._idle.set()

    def look(self) -> bool:
        """Look at the recording once; True if a plan was handed to the core."""
        state = self._client.state()
        if not state["recording"]:
            self._perhaps_resume()
            return False
        if state["replaying"] and state["clean_iterations"] >= 2:
            self._client.set_recording(False)
            return False
        packed, counts, whole = self._client.recording()
        pattern = self._pattern(packed, whole)
        if pattern is None:
            self._nothing_found(len(packed) // 48, state["events_dropped"])
            return False
        if pattern.unresolved and pattern.iterations < PATIENT_ITERATIONS:
            self._client.check_again_after(max(64, 2 * len(pattern.buffers)))
            return False
        if self.planned is not None and self.planned.same_sequence(pattern):
            if not self.planned.outlived_by(pattern):
                self._client.check_again_after(max(256, 4 * len(pattern.buffers)))
                return False
            # The same allocations, but something now lives longer than it did when the plan was made.
            pattern = self.planned.extended(pattern)
        return self._plan(pattern, counts)

    def _pattern(self, packed: bytes, whole: bool) -> Pattern | None:
        from mempool.recording import Recording
        from traces.pattern import find_pattern

        trace = Recording(self._alignment).trace(packed)
        return find_pattern(trace, small_bytes=self._small_bytes, whole_recording=whole)

    def _plan(self, pattern: Pattern, counts: list[int]) -> bool:
        from mempool.planned import make_plan

        planned = make_plan(pattern, alignment=self._alignment, interrupt=self._stop.is_set)
        if planned is None or self._stop.is_set():
            return False
        self._client.install(planned.native(counts), pattern.iterations_seen)
        self.planned = planned
        self.plans += 1
        self._vain = 0
        self._core.set_retained_limit(cache_bytes(planned))
        self._client.check_again_after(max(64, 4 * len(pattern.buffers)))
        log.info("planned %d buffers into %d bytes", len(pattern.buffers), planned.plan.arena_bytes)
        return True

    def _nothing_found(self, kept: int, dropped: int) -> None:
        self._vain += 1
        if self._vain == LOOKS_BEFORE_CACHING and self.planned is None:
            self._core.set_retained_limit(max(_LEAST_CACHE, self._core.stats()["reserved"]["peak"] // 8))
        if dropped:
            # The ring has wrapped and shows no iteration: stop paying for it, and try again much later.
            self._client.set_recording(False)
            self._resume_at = 4 * self._client.state()["allocations"]
        else:
            self._client.check_again_after(max(64, kept // 3))

    def _perhaps_resume(self) -> None:
        """Record again when the pattern has changed for good, or, without one, after a long pause."""
        state = self._client.state()
        if state["recording"] or self.planned is None and not self._resume_at:
            return
        changed = state["spoilt_iterations"] >= SPOILT_ITERATIONS or not state["replaying"]
        if changed and state["allocations"] >= self._resume_at:
            log.info("recording again")
            self._client.set_recording(True)

    def wait(self, seconds: float) -> bool:
        """Wait until a plan is in effect; False if there is none after that time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._client.state()["replaying"] or self.plans:
                return True
            time.sleep(0.002)
        return False

"""Planner thread: plans in the background at low priority and bounded cost, never on the hot path."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import math
import os
import resource
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mempool import _core
from mempool.logs import log
from mempool.planning.learner import Learner
from mempool.planning.options import OPTIONS
from mempool.planning.plan_builder import PlanBuilder
from mempool.settings import NEVER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mempool.planning.plan_files import SavedPlans


_FOR_EVER = 1e9  # seconds
#: Modules that planning imports.
NEEDED = (
    "traces.iterations.pattern",
    "solvers.packing.streams",
    "mempool.planning.variants",
    "mempool.recording.events",
)


#: Planners with a running thread.
_running: set[Planner] = set()


@atexit.register
def _stop_all() -> None:
    """Stop all planners, since an exiting interpreter would kill their threads during work."""
    for planner in list(_running):
        planner.stop()


def thread_cost_seconds() -> float:
    """Return the calling thread's cost in seconds: its work, and its waits for the interpreter's lock."""
    return time.thread_time() + OPTIONS.handover_seconds * resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class ProcessorBudget:
    """Budget of processor time in seconds: an allowance at once, then a share of the elapsed time.

    Work in progress is finished, so a budget can be overdrawn. The debt is bounded, so that one long solve
    does not delay the next look by minutes.
    """

    def __init__(
        self,
        *,
        allowance: float,
        share: float,
        most_debt: float,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = thread_cost_seconds,
    ) -> None:
        """Start with the full allowance.

        Args:
            allowance: most seconds that can be spent at once.
            share: share of the elapsed time that is added.
            most_debt: largest debt, in seconds.
            clock: returns the elapsed time in seconds.
            spent: returns the cost of the calling thread so far, in seconds.
        """
        self._allowance, self._share, self._most_debt = allowance, share, most_debt
        self._clock, self._spent = clock, spent
        self._left, self._then = allowance, clock()

    def is_positive(self) -> bool:
        """Return true if the budget is positive."""
        return self.remaining_seconds() > 0

    def remaining_seconds(self) -> float:
        """Return the seconds that may be spent now; a debt is negative."""
        now = self._clock()
        self._left = min(self._allowance, self._left + self._share * (now - self._then))
        self._then = now
        return self._left

    def charge(self, seconds: float) -> None:
        """Charge `seconds` to the budget."""
        self._left = max(-self._most_debt, self._left - seconds)

    @contextmanager
    def charge_thread(self) -> Iterator[Callable[[], None]]:
        """Charge the calling thread's cost in this context, unless the yielded function is called."""
        before, charge = self._spent(), True

        def forgive() -> None:
            nonlocal charge
            charge = False

        try:
            yield forgive
        finally:
            if charge:
                self.charge(self._spent() - before)


#: Budget of looks that the program itself requests.
_UNLIMITED = ProcessorBudget(allowance=math.inf, share=0.0, most_debt=0.0)


class Planner:
    """Planner of one client.

    Attributes:
        budget: processor time that looks and plans may use.
        learner: finds patterns worth a plan.
        registry: plans of the client.
        requested: true once the program itself marked an iteration or waited for a plan.
    """

    def __init__(
        self,
        client: _core.Client,
        device: _core.Device,
        *,
        small_bytes: int,
        wait_bytes: int = NEVER,
        explain: Callable[[], list[str]] | None = None,
        framework: str = "",
    ) -> None:
        """Create the planner without starting the thread.

        Args:
            client: client whose recording is analysed.
            device: device whose memory is planned.
            small_bytes: requests up to this size are not planned.
            wait_bytes: bytes that a plan must save for each wait of one stream for another.
            explain: returns log lines about new departures from the plan.
            framework: name of the framework that uses the memory, or empty.
        """
        self._client, self._device = client, device
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._pid = os.getpid()
        self._explain = explain
        self._learning = threading.RLock()
        self._looking = False
        self._next_log_at = 0.0
        # not logged: "capture" is brief, offloading reports "limit"
        self._logged_refusals = {"", "capture", "limit"}
        self.budget = ProcessorBudget(
            allowance=OPTIONS.gpu_allowance_seconds if device.slow_return else OPTIONS.allowance_seconds,
            share=OPTIONS.time_share,
            most_debt=OPTIONS.max_debt_seconds,
        )
        self._work_left = self._reset_requested = False
        self._learned = 0  # number of looks that installed a plan
        self.requested = False
        builder = PlanBuilder(
            client, device, wait_bytes=wait_bytes, framework=framework, interrupt=self._stop.is_set
        )
        self.learner = Learner(client, device, builder, small_bytes=small_bytes, interrupt=self._stop.is_set)
        self.registry = builder.registry

    def is_worthwhile(self) -> bool:
        """Return true if a plan may save more than it costs; the thread makes none otherwise.

        A plan for little host memory saves nothing, but the program may ask for one: by marking iterations,
        or by waiting.
        """
        if self.requested or self._device.slow_return:
            return True
        return bool(self._client.stats()["live"]["peak"] >= OPTIONS.min_host_bytes)

    def look(self) -> bool:
        """Look at the recording once, regardless of the budget; return true if a plan was installed."""
        if self._pid != os.getpid():
            return False  # a forked child records nothing, and lacks the lock's holder
        with self._learning:
            if self._looking:
                return False  # a signal handler interrupted a look
            self._looking, made = True, self.registry.made
            try:
                self._turn(budget=_UNLIMITED)
            finally:
                self._looking = False
            return self.registry.made > made

    def reset_plans(self, *, alternate: bool = False) -> None:
        """Request that the thread drops all plans and records again; return at once.

        `alternate`: from now on, marked iterations may alternate between layouts if that saves memory.
        """
        self.learner.builder.alternates |= alternate
        self._reset_requested = True
        self._client.wake()

    def saved_plans(self) -> SavedPlans | None:
        """Return the known plans, for another process; None if no plan is known."""
        if self._pid != os.getpid():
            return self.learner.saved_plans()  # a forked child lacks the thread that holds the lock
        with self._learning:
            return self.learner.saved_plans()

    def start(self, loaded: SavedPlans | None = None) -> None:
        """Start recording, and plan in a thread of low priority."""
        # Import the modules that planning needs before the program works: an import in a background thread
        # would hand the interpreter's lock over hundreds of times, and delay the first plan.
        with _core.Bypass():
            for module in NEEDED:
                importlib.import_module(module)
        self.learner.begin(loaded)
        self.start_thread()

    def start_thread(self) -> None:
        """Start the thread; without a recording, the thread only releases idle memory."""
        # NumPy fails if two threads import it at once, and the program may be about to import NumPy.
        importlib.import_module("numpy")
        self._thread = threading.Thread(target=self._run, name="mempool-planner", daemon=True)
        _running.add(self)
        try:
            self._thread.start()
        except BaseException:
            _running.discard(self)
            self._thread = None
            raise

    def stop(self, seconds: float = 5.0) -> None:
        """End the thread, waiting at most `seconds`; a running solve is interrupted."""
        if self._pid != os.getpid():
            return  # a forked child lacks the thread
        self._stop.set()
        self._client.wake()
        if self._thread is not None and seconds > 0:
            self._thread.join(seconds)

    def _run(self) -> None:
        try:
            with _core.Bypass():
                self._work()
        finally:
            _running.discard(self)

    def _work(self) -> None:
        with contextlib.suppress(OSError):  # sandboxes may forbid it; the solver is brief
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        logged = ""
        while not self._stop.is_set():
            try:
                self.run_once()
            except Exception as error:
                if self._stop.is_set() or not threading.main_thread().is_alive():
                    return  # the interpreter is shutting down: imports may fail
                if repr(error) != logged:
                    logged = repr(error)
                    log.exception("the planner failed; the pool goes on without a new plan for now")
                with self._learning, contextlib.suppress(Exception):
                    self._client.advance_recording("failed")
                # A pause of the recording does not help if the wait itself fails.
                self._stop.wait(OPTIONS.retry_seconds)

    def run_once(self, seconds: float = _FOR_EVER) -> None:
        """Wait at most `seconds` for work, then do the work; the thread repeats this function."""
        news = self._wait(seconds)
        if self._stop.is_set():
            return
        with self._learning:
            self._work_left = self._turn(work=self._work_left or news)

    def _wait(self, seconds: float) -> bool:
        """Wait until there may be work; return true if the recording deserves a look."""
        if self._work_left or self._explain is not None:
            seconds = min(seconds, OPTIONS.turn_seconds)
        with self._learning:
            conditions = self.learner.wake_conditions()
        news, looked = self._client.wait_for_work(
            seconds,
            search_seconds=self.budget.remaining_seconds(),
            **conditions,
        )
        self.budget.charge(looked)
        return news

    def _turn(self, *, work: bool = True, budget: ProcessorBudget | None = None) -> bool:
        """Do all work that the budget permits; return true if work remains.

        Args:
            work: true if the recording deserves a look.
            budget: see `Planner.budget`, the default; otherwise the program itself requests the turn.
        """
        learner, requested = self.learner, budget is not None
        budget = budget or self.budget
        if self._reset_requested:
            self._reset_requested = False
            learner.reset_plans()
        self.registry.refresh()
        if budget.is_positive() and learner.builder.neighbors.shares_memory():
            with budget.charge_thread():
                learner.builder.replan_for_shared_arena()
        if budget.is_positive() and self._client.pinned_ranges():
            with budget.charge_thread():
                learner.builder.replan_around_pinned()
        if work and (requested or self.is_worthwhile()):  # otherwise the work stays until it is
            if not learner.may_learn():
                work = False
            elif budget.is_positive():
                work = False
                self._learn(budget)
        elif not work:
            learner.resume_if_changed()
        learner.drop_if_useless()
        self.registry.warn_if_foreign()
        if not requested:
            self._log_news()
        return work

    def _learn(self, budget: ProcessorBudget) -> None:
        """Try to make a plan; charge the budget unless the program follows known plans.

        If known plans serve only a part of the program, further plans may serve no more.
        """
        follows = self.registry.are_followed()
        free = OPTIONS.free_plans if self.registry.is_profitable() else OPTIONS.first_free_plans
        with budget.charge_thread() as forgive:
            learned = self.learner.learn()
            self._learned += learned
            if learned and follows and self._learned <= free:
                forgive()

    def _log_news(self) -> None:
        """Log once why the arena was refused and, with ``explain``, new divergences from the plan."""
        state = self._client.state()
        if state["refusal"] not in self._logged_refusals:
            self._logged_refusals.add(state["refusal"])
            log.warning("%s; going on without, trying again later", self._refusal_message(state))
        if self._explain is not None and time.monotonic() >= self._next_log_at:
            for line in self._explain()[: OPTIONS.log_lines]:
                log.warning("%s", line)
            self._next_log_at = time.monotonic() + OPTIONS.log_seconds

    def _refusal_message(self, state: dict[str, Any]) -> str:
        """Return the message about the refused arena: size, reason and, if known, free memory."""
        from mempool.reporting.outcomes import REFUSALS
        from mempool.units import binary

        free, total = self._device.memory() if state["refusal"] == "memory" else (0, 0)
        free_memory = f", which has {binary(free)} free of {binary(total)}" if total else ""
        arena = f"an arena of {binary(state['needed_bytes'])}"
        return f"{arena} cannot be had from the device{free_memory}: {REFUSALS[state['refusal']]}"

    def wait(self, seconds: float) -> bool:
        """Wait until a plan exists; return false after `seconds`, or if no thread plans."""
        self.requested = True
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._client.state()["replaying"] or self.registry.made:
                return True
            if self._thread is None or self._stop.is_set():
                return False  # no thread plans
            time.sleep(0.002)
        return False

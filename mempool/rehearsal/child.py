"""The rehearsed program's process: load the stand-in, measure PyTorch, end the program."""

from __future__ import annotations

import atexit
import contextlib
import os
import resource
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mempool.cli.run.child import AfterImport
from mempool.rehearsal import standin
from mempool.rehearsal.job import POOLS, Job, Outcome

if TYPE_CHECKING:
    from types import FrameType, TracebackType

#: Environment variable with the job; only the program's own process has it, child processes do not.
VARIABLE = "MEMPOOL_REHEARSAL"
_MOST_IGNORED = 8  #: steps for which a program may catch the end of the rehearsal before its process ends


class RehearsalEnd(SystemExit):
    """End of the program after its last step. Programs that catch `Exception` do not catch it."""

    def __init__(self) -> None:
        super().__init__(0)


def begin() -> None:
    """Load the stand-in; in the program's own process also prepare the measurement."""
    folder = os.environ.get(standin.FOLDER)
    if folder is None:
        return
    standin.load(Path(folder))
    if (text := os.environ.pop(VARIABLE, None)) is not None:
        Rehearsal(Job.from_json(text)).begin()


class Rehearsal:
    """A program under measurement.

    Attributes:
        job: the request.
        outcome: the result so far.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.outcome = Outcome(job.allocator)
        self._folder = Path(job.folder)
        self._began = self._last_step = time.monotonic()
        self._steps: dict[int, int] = {}  # of each optimizer, by identity
        self._ended = self._written = self._recording = False
        self._ignored = 0
        self._pid = os.getpid()
        self._pool: Any = None
        self._torch: Any = None

    def begin(self) -> None:
        """Install the hooks that wait for PyTorch, for the program's end, and for its errors."""
        sys.meta_path.insert(0, AfterImport(self._after_import))
        sys.excepthook = self._on_error
        atexit.register(self._finish)
        threading.Thread(target=self._watch, name="mempool-rehearsal", daemon=True).start()

    # --- PyTorch

    def _after_import(self, framework: str) -> None:
        if framework != "torch":
            return
        import torch

        self._torch = torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from mempool.rehearsal import checkpoints, ranks, value_reads

        register_optimizer_step_post_hook(self._after_step)
        value_reads.install(self.outcome.value_reads)
        if not self.job.allow_writes:
            checkpoints.redirect(self._folder / "checkpoints", self.outcome.redirected)
        if self.job.ranks > 1:
            ranks.pretend(self.job.ranks)
        if self.job.allocator in POOLS:
            import mempool.torch

            self._pool = mempool.torch.install(
                device="cuda", memory=POOLS[self.job.allocator], plan=self.job.plan
            )
            self._pool.leave_open_at_exit()
        after_initialization(torch, self._after_cuda)

    def _after_cuda(self) -> None:
        """Set the limit and begin the history, once PyTorch has initialized CUDA."""
        torch = self._torch
        # Other allocators have neither an observer of requests that fail nor a history. Their errors are noted
        # as Python makes them.
        own = self._pool is None and torch.cuda.get_allocator_backend() == "native"
        if own:
            torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)
        else:
            make = torch.OutOfMemoryError.__init__

            def note(error: BaseException, *message: object) -> None:
                make(error, *message)
                self._on_out_of_memory()

            torch.OutOfMemoryError.__init__ = note
        if self.job.limit_bytes is not None:
            for device in range(torch.cuda.device_count()):
                total = torch.cuda.get_device_properties(device).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, self.job.limit_bytes / total), device)
        if self.job.history and own:
            from mempool.rehearsal import module_names

            # Stacks of frees too would be gathered while an exception is on its way, and clear it.
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python")
            module_names.attach(torch)
            self._recording = True

    # --- steps

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        key = id(optimizer)
        self._steps[key] = self._steps.get(key, 0) + 1
        self._last_step = time.monotonic()
        if self._steps[key] == max(self._steps.values()):
            self.outcome.steps = self._steps[key]
            self._measure()
            self.outcome.step_peaks.append(self.outcome.peak_allocated_bytes)
        fewest, most = min(self._steps.values()), max(self._steps.values())
        if fewest >= self.job.steps or most >= 16 * self.job.steps:
            self._end("steps")

    def _end(self, reason: str) -> None:
        """Raise the end of the program, from the thread that trains."""
        self._ended = True
        self.outcome.ended = reason
        self._ignored += 1
        if self._ignored > _MOST_IGNORED:
            self._leave()
        raise RehearsalEnd

    def _measure(self) -> None:
        torch = self._torch
        if torch is None or not torch.cuda.is_initialized():
            return
        outcome, held = self.outcome, []
        for device in range(torch.cuda.device_count()):
            statistics = torch.cuda.memory_stats(device)
            peak = statistics.get("reserved_bytes.all.peak", 0)
            free, total = torch.cuda.mem_get_info(device)
            held.append((peak, device, statistics, total - free))
        outcome.devices_used = sum(peak > 0 for peak, *_ in held)
        peak, device, statistics, used = max(held, key=lambda entry: (entry[0], -entry[1]))
        outcome.device = device
        outcome.peak_reserved_bytes = peak
        outcome.peak_allocated_bytes = statistics.get("allocated_bytes.all.peak", 0)
        outcome.allocated_bytes = statistics.get("allocated_bytes.all.current", 0)
        outcome.reserved_bytes = statistics.get("reserved_bytes.all.current", 0)
        outcome.segments = statistics.get("segment.all.current", 0)
        outcome.device_bytes = max(outcome.device_bytes, used + peak - outcome.reserved_bytes)

    # --- the end

    def _watch(self) -> None:
        """End a program that runs for too long, with the line at which its main thread is."""
        while not self._ended:
            time.sleep(0.1)
            now = time.monotonic()
            if self.job.seconds is not None and now - self._began >= self.job.seconds:
                self.outcome.ended = "seconds"
            elif now - self._last_step >= self.job.timeout:
                self.outcome.ended = "hang"
                self.outcome.message = f"no optimizer step within {self.job.timeout:g} s"
            else:
                continue
            self._ended = True
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            self.outcome.line = program_line(frame)
            if self.outcome.ended == "hang" and frame is not None:
                self.outcome.message += (
                    f", in {frame.f_code.co_name} of {frame.f_code.co_filename}:{frame.f_lineno}"
                )
            self._leave()

    def _on_out_of_memory(self, *_: int) -> None:
        """Note the first request that fails, whether or not the program goes on."""
        if self.outcome.out_of_memory_in_step is None:
            self.outcome.out_of_memory_in_step = self.outcome.steps + 1
            self.outcome.line = program_line(sys._getframe(1))

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._torch is not None and isinstance(error, self._torch.OutOfMemoryError):
            self.outcome.ended = "out of memory"
            if self.outcome.out_of_memory_in_step is None:
                self.outcome.out_of_memory_in_step = self.outcome.steps + 1
        else:
            self.outcome.ended = "error"
        self.outcome.exit_code = 1
        text = " ".join(str(error).split())
        self.outcome.message = f"{kind.__name__}: {text}" if text else kind.__name__
        places = [own_line(frame, number) for frame, number in traceback.walk_tb(trace)]
        self.outcome.line = next(filter(None, reversed(places)), "")
        self._ended = True
        sys.__excepthook__(kind, error, trace)

    def _finish(self) -> None:
        """Write the result at the end of the process, whatever ended it."""
        if os.getpid() != self._pid or self._written:
            return
        self._written = True
        if not self._ended:
            self.outcome.ended = "program"
        self._ended = True
        with contextlib.suppress(Exception):
            self._measure()
        self.outcome.seconds = time.monotonic() - self._began
        self.outcome.host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self._recording:
            self._torch.cuda.memory._dump_snapshot(str(self._folder / "history.pickle"))
        self.outcome.write(self._folder / "outcome.json")

    def _leave(self) -> None:
        """End the process at once, with its result."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._finish()
        os._exit(0)


def after_initialization(torch: Any, then: Any) -> None:
    """Call a function once, right after PyTorch's lazy initialization of CUDA."""
    torch.cuda._lazy_call(then)


def own_line(frame: FrameType, number: int) -> str:
    """Return ``file:line`` of a line in a frame of the program itself, or "" for frames of libraries."""
    name = frame.f_code.co_filename
    if name.startswith("<") or "site-packages" in name or name.startswith(_LIBRARIES):
        return ""
    return f"{os.path.relpath(name)}:{number}"


def program_line(frame: FrameType | None) -> str:
    """Return the innermost line of the program in a stack, or the innermost line of all."""
    innermost = "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    while frame is not None:
        if line := own_line(frame, frame.f_lineno):
            return line
        frame = frame.f_back
    return innermost


_LIBRARIES = (os.path.dirname(os.__file__), str(Path(__file__).parents[1]))  # noqa: PTH120

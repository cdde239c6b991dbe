"""The rehearsed program's process: load the stand-in, measure PyTorch, end the program."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import resource
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mempool.cli.run.child import AfterImport
from mempool.rehearsal import checkpoints, compilation, generation, standin
from mempool.rehearsal.compiled_program import CompiledProgram
from mempool.rehearsal.device_peaks import DevicePeaks
from mempool.rehearsal.ending import Ending, RehearsalEnd
from mempool.rehearsal.job import POOLS, PYTORCH_SETTINGS, Job, Outcome
from mempool.rehearsal.program_lines import own_line, program_line
from mempool.units import binary

if TYPE_CHECKING:
    from types import TracebackType

#: Environment variables with the job, and with the number of the program's own process, once that has begun.
VARIABLE, PROCESS = "MEMPOOL_REHEARSAL", "MEMPOOL_REHEARSAL_PROCESS"
_MOST_IGNORED = 8  #: steps for which a program may catch the end of the rehearsal before its process ends
_NO_PLAN = "so the run does not follow its plan: compiled operations allocate in another order"
_NO_DEVICE = "invalid device ordinal"  #: in PyTorch's error for a GPU that the machine lacks
_FEW_DEVICES = "the program asks for a GPU that the machine lacks: --devices N gives it N"
_COMPILER = "compile_worker"  #: on the command line of processes in which PyTorch compiles
_GRACE_SECONDS = 10.0  #: time for a program to end after its last step, its time or its error


def begin() -> None:
    """Load the stand-in and, except in processes that only compile, prepare the measurement."""
    folder = os.environ.get(standin.FOLDER)
    if folder is None:
        return
    standin.load(Path(folder))
    text = os.environ.get(VARIABLE)
    if text is not None and not any(_COMPILER in word for word in sys.orig_argv):
        job, own = Job.from_json(text), str(os.getpid())
        # A program that replaces itself by another one (exec) keeps its number.
        main = os.environ.get(PROCESS) or own
        os.environ[PROCESS] = main
        Rehearsal(job if main == own else job.of_child()).begin()
    else:
        sys.meta_path.insert(0, AfterImport(compilation.adjust, compilation.MODULES, waits=False))


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
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # of optimizers
        self._steps: list[int] = []  # by the number of the optimizer
        self._optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._ended = self._written = self._recording = False
        self._writing = threading.RLock()
        self._ignored = 0
        self._pid = os.getpid()
        self._pool: Any = None
        self._ending = Ending()
        self._torch: Any = None
        self._peaks: DevicePeaks | None = None
        self._compiled: CompiledProgram | None = None
        self._step_hook: Any = None

    def begin(self) -> None:
        """Install the hooks that wait for PyTorch, for the program's end, and for its errors."""
        modules = (*generation.MODULES, *compilation.MODULES, *checkpoints.MODULES)
        sys.meta_path.insert(0, AfterImport(self._after_import, modules))
        sys.excepthook = self._on_error
        atexit.register(self._finish)
        if not self.job.child or self.job.seconds is not None:
            threading.Thread(target=self._watch, name="mempool-rehearsal", daemon=True).start()

    # --- PyTorch

    def _after_import(self, name: str) -> None:
        if name == "torch":
            self._after_torch()
        elif name in compilation.MODULES:
            compilation.adjust(name)
        elif name in generation.MODULES:
            generation.end_at_length(name)
        if name in checkpoints.MODULES and not self.job.allow_writes:
            checkpoints.adjust(name, self.outcome.redirected)

    def _after_torch(self) -> None:
        import torch

        self._torch = torch
        self._last_step = time.monotonic()  # the import has no part in the time without a step
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from mempool.rehearsal import ranks, value_reads, value_rules

        self._step_hook = register_optimizer_step_post_hook(self._after_step)
        if self.job.seconds is not None:
            torch.nn.modules.module.register_module_forward_pre_hook(
                lambda *_: None if torch.compiler.is_compiling() else self._ending.check()
            )
        self._peaks = DevicePeaks(torch, self.outcome)
        self._peaks.keep()
        self._compiled = CompiledProgram(self.job, self.outcome, torch)
        if self.job.compiled:
            self._start_clock()
            self._compiled.compile_within_limit()
        else:
            self._compiled.note_calls(self._keep_step_hook)
        self._note_optimizers(torch)
        # The number of devices is that of the stand-in, whatever CUDA_VISIBLE_DEVICES names.
        torch.cuda._device_count_nvml = lambda: -1
        # Checks of values on the device would fail: no values are computed.
        torch.distributions.Distribution.set_default_validate_args(False)
        value_reads.install(self.outcome.value_reads, self.outcome.shape_reads)
        value_rules.install(self.outcome.shape_reads, self.job.select)
        ranks.accept_shapes()
        ranks.keep_objects()
        if self.job.ranks > 1:
            ranks.pretend(self.job.ranks)
        if self.job.allocator in POOLS:
            import mempool.torch

            options: dict[str, Any] = {"remember": "fresh", "background": False} if self.job.remember else {}
            if self.job.offload_limit is not None:
                options["limit"] = self.job.offload_limit
                self._start_clock()
            self._pool = mempool.torch.install(
                device="cuda", memory=POOLS[self.job.allocator], plan=self.job.plan, **options
            )
            self._pool.leave_open_at_exit()
        torch.cuda._lazy_call(self._after_cuda)

    def _start_clock(self) -> None:
        """Let kernels and copies take the times of the job's card, by which the pool plans."""
        from mempool.hardware.gpu_memory import card
        from mempool.hardware.gpu_throughput import rates_of
        from mempool.rehearsal import clock
        from solvers.swap import PRESETS

        gpu = card(self.job.card or "H100")
        rates = rates_of(gpu.name, gpu.capability)
        clock.start(rates, PRESETS[rates.link])

    def _note_optimizers(self, torch: Any) -> None:
        """Remember the program's optimizers, so that the rehearsal lasts until each has stepped."""
        initialize = torch.optim.Optimizer.__init__

        @functools.wraps(initialize)
        def noted(optimizer: Any, *args: Any, **options: Any) -> None:
            initialize(optimizer, *args, **options)
            self._optimizers.add(optimizer)

        torch.optim.Optimizer.__init__ = noted

    def _keep_step_hook(self) -> None:
        """Let compiled steps of an optimizer call the hook: a graph ends there."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._step_hook.remove()
        self._step_hook = register_optimizer_step_post_hook(self._torch.compiler.disable(self._after_step))

    def _after_cuda(self) -> None:
        """Set the limit and begin the history, once PyTorch has initialized CUDA."""
        torch = self._torch
        if os.getpid() != self._pid:  # forked from the process of the program
            self._pid, self.job, self.outcome = os.getpid(), self.job.of_child(), Outcome(self.job.allocator)
            if self._peaks is not None:
                self._peaks.outcome = self.outcome
        if self.job.child and (util := sys.modules.get("multiprocessing.util")) is not None:
            util.Finalize(None, self._finish_child, exitpriority=0)  # its processes have no exit handlers
        # Other allocators have neither an observer of requests that fail nor a history. Their errors are
        # noted as Python makes them.
        own = self._pool is None and torch.cuda.get_allocator_backend() == "native"
        self._note_settings()
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

    def _note_settings(self) -> None:
        """Note if the program has replaced the settings that select the job's allocator."""
        wanted = PYTORCH_SETTINGS.get(self.job.allocator)
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            setting = os.environ.get(name, "")
            if wanted is not None and (wanted not in setting or (not wanted and "expandable" in setting)):
                self.outcome.notes.append(f"{name}={setting} holds, not the allocator {self.job.allocator}")

    # --- steps

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if os.getpid() != self._pid:
            return
        number = self._numbers.setdefault(optimizer, len(self._steps))
        if number == len(self._steps):
            self._steps.append(0)
        self._steps[number] += 1
        self._last_step = time.monotonic()
        if self.job.remember:
            self._pool.plan_now()
        if self.job.offload_limit is not None:
            assert self._compiled is not None
            cost = self._compiled.limit_cost() if self.job.compiled else self._pool.offloading.cost()
            self.outcome.offloading = cost
        if self._steps[number] == max(self._steps):
            self.outcome.steps = self._steps[number]
            self._measure()
            self.outcome.step_peaks.append(self.outcome.peak_allocated_bytes)
            if self.job.child:
                self._save()  # the program may kill the process
        # An optimizer that steps more rarely, as a GAN's generator's does, may not have stepped yet.
        waiting = any(other not in self._numbers for other in self._optimizers)
        fewest, most = 0 if waiting else min(self._steps), max(self._steps)
        if (fewest >= self.job.steps or most >= 16 * self.job.steps) and not _serves_a_pool():
            self._end()

    def _end(self) -> None:
        """Raise the end of the program, from the thread that trains."""
        self._ended = True
        self._last_step = time.monotonic()
        self.outcome.ended = "steps"
        self._ignored += 1
        if self._ignored > _MOST_IGNORED:
            self._leave()
        raise RehearsalEnd

    def _measure(self) -> None:
        if self._peaks is not None:
            self._peaks.measure()

    # --- the end

    def _watch(self) -> None:
        """End a program that runs for too long."""
        while True:
            time.sleep(0.1)
            if self._written:  # the process ends by itself
                return
            now = time.monotonic()
            if self._ended:
                # Threads of the program that wait for its training would keep the process.
                if now - self._last_step >= _GRACE_SECONDS:
                    self._leave()
                continue
            if self.job.seconds is not None and now - self._began >= self.job.seconds:
                self.outcome.ended = "seconds"
                self._interrupt()
            elif not self.job.child and now - self._last_step >= self.job.timeout:
                self._note_hang()
                self._leave()

    def _interrupt(self) -> None:
        """Raise the end of the program in the main thread."""
        self._ended = True
        self._last_step = time.monotonic()
        self._ending.request()

    def _note_hang(self) -> None:
        """Note where the main thread is: the program's line, and the innermost function."""
        self._ended = True
        self.outcome.ended = "hang"
        self.outcome.message = f"no optimizer step within {self.job.timeout:g} s"
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        self.outcome.line = program_line(frame)
        if frame is not None:
            code = frame.f_code
            self.outcome.message += f", in {code.co_name} of {code.co_filename}:{frame.f_lineno}"
        if self.outcome.steps == 0:
            self.outcome.message += "; --seconds N ends a program without an optimizer"

    def _on_out_of_memory(self, *_: int) -> None:
        """Note the first request that fails, whether or not the program goes on."""
        if self.outcome.out_of_memory_in_step is None:
            self.outcome.out_of_memory_in_step = self.outcome.steps + 1
            # A thread of the backward pass has no Python frame of its own; the main thread waits for it.
            frame = sys._getframe().f_back or sys._current_frames().get(threading.main_thread().ident or 0)
            self.outcome.line = program_line(frame)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._note_error(kind, error, trace):
            sys.__excepthook__(kind, error, trace)

    def _note_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> bool:
        """Note the error that ended the program; return false if the message says all."""
        refused = self._compiled is not None and self._compiled.note_refusal(error)
        if refused or (self._torch is not None and isinstance(error, self._torch.OutOfMemoryError)):
            self.outcome.ended = "out of memory"
            if self.outcome.out_of_memory_in_step is None:
                self.outcome.out_of_memory_in_step = self.outcome.steps + 1
        else:
            self.outcome.ended = "error"
        if _NO_DEVICE in str(error):
            self.outcome.notes.append(_FEW_DEVICES)
        self.outcome.exit_code = 1
        text = " ".join(str(error).split())
        text = text.partition(" If reserved but unallocated")[0]  # advice of PyTorch's
        self.outcome.message = f"{kind.__name__}: {text}" if text else kind.__name__
        places = [own_line(frame, number) for frame, number in traceback.walk_tb(trace)]
        self.outcome.line = next(filter(None, reversed(places)), "")
        if isinstance(error, SyntaxError):
            self.outcome.line = f"{error.filename}:{error.lineno}"
        self._ended = True
        self._last_step = time.monotonic()
        return not refused

    def _finish(self) -> None:
        """Write the result at the end of the process, whatever ended it; a second thread waits for it."""
        if os.getpid() == self._pid:
            with self._writing:
                if self._written:
                    return
                self._written = True
                if not self._ended:
                    self.outcome.ended = "program"
                self._ended = True
                self._write()

    def _finish_child(self) -> None:
        """Write the result of a process of multiprocessing, which ends while its error is on the way."""
        error = sys.exc_info()[1]
        if error is not None and not self._ended and not isinstance(error, SystemExit):
            self._note_error(type(error), error, error.__traceback__)
        self._finish()

    def _write(self) -> None:
        """Complete and write the result."""
        with contextlib.suppress(Exception):
            self._measure()
        if self._compiled is not None and (errors := compilation.failures):
            self._compiled.note_eager(f"{len(errors)} of the program's graphs did not compile ({errors[0]})")
        if self.job.remember and self._pool is not None:
            self._note_plan()
        if self.job.check_streams:
            self.outcome.stream_faults = standin.stream_faults()
        self.outcome.seconds = time.monotonic() - self._began
        self.outcome.host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # A thread that still allocates would contradict the snapshot.
        if self._recording and threading.current_thread() is threading.main_thread():
            self._torch.cuda.memory._dump_snapshot(str(self._folder / "history.pickle"))
        self._save()

    def _save(self) -> None:
        """Write the result; that of a child process only if it asked a device for memory."""
        if not self.job.child:
            self.outcome.write(self._folder / "outcome.json")
        elif self.outcome.asked_device:
            self.outcome.name, self.outcome.pid = _process_name(), os.getpid()
            with contextlib.suppress(OSError):  # the rehearsal has ended
                self.outcome.write(self._folder / f"process-{os.getpid()}.json")

    def _note_plan(self) -> None:
        """Keep the pool's plan, and note what it is of."""
        planned = self._pool.planned
        if self._compiled is not None and self._compiled.eager:
            self.outcome.notes.append(_NO_PLAN)
            return
        self._pool.close()
        if planned is None:
            self.outcome.notes.append("there is no plan: no step was seen to repeat")
            return
        arena, buffers = binary(planned.plan.arena_bytes), len(planned.buffers)
        self.outcome.notes.append(f"a plan of {buffers:,} buffers in an arena of {arena}")

    def _leave(self) -> NoReturn:
        """End the process at once, with its result."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._finish()
        os._exit(self.outcome.exit_code)


def _process_name() -> str:
    """Return the name that multiprocessing gives to this process, else that of its script, with the rank."""
    module: Any = sys.modules.get("multiprocessing.process")
    name = "MainProcess" if module is None else module.current_process().name
    rank = os.environ.get("RANK")
    return name if name != "MainProcess" else Path(sys.argv[0]).name + (f" rank {rank}" if rank else "")


def _serves_a_pool() -> bool:
    """Return whether this process serves a pool of processes, which waits until its work is done."""
    module: Any = sys.modules.get("multiprocessing.process")
    target = None if module is None else getattr(module.current_process(), "_target", None)
    return getattr(target, "__module__", "") in ("multiprocessing.pool", "concurrent.futures.process")

"""The tried program's process: PyTorch on tensors without memory, recorded until the program ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import inspect
import json
import os
import runpy
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.dataloader import DataLoader, _SingleProcessDataLoaderIter

from mempool.cli.run.child import AfterImport
from mempool.recording.torch import AccessRecorder
from mempool.rehearsal import generation
from mempool.rehearsal.checkpoints import Redirection
from mempool.rehearsal.child import Ending, RehearsalEnd, own_line, program_line
from mempool.torch.estimate.device.emulation import accept_cuda_names, emulate_device
from mempool.torch.estimate.fake.copies import EAGER
from mempool.torch.estimate.fake.fake_run import host_counts
from mempool.torch.estimate.fake.mode import ValuelessMode
from mempool.torch.estimate.program.places import DeviceNames, Places
from mempool.torch.estimate.program.run import Request, Result
from mempool.torch.estimate.program.value_reads import ValueReads, finite_numbers
from mempool.torch.estimate.sources.scripts import keep_source
from traces.formats.parquet import write_trace
from traces.trace import COLUMNS

if TYPE_CHECKING:
    from traces import Trace

_CLOSURE = "{} calls the model as often as values say"
_THREAD = "it runs a model in another thread, where nothing is recorded"
_STUBBORN = "it catches every exception, and so does not end"
#: Signs of errors of tensors without values.
_VALUES = ("DataDependent", "DynamicOutputShape", "FakeTensor", "for tensor subclasses", "meta tensor")
_MOST_IGNORED = 30  #: ends of the run that a program may catch


class _Program:
    """A program under trial.

    Attributes:
        request: the request.
        result: the result so far.
    """

    def __init__(self, request: Request) -> None:
        self.request, self.result = request, Result()
        self._last_step = time.monotonic()
        self._optimizers: dict[int, tuple[torch.optim.Optimizer, int]] = {}
        self._ignored = 0
        self._over = threading.Event()
        self._ending = Ending()
        self._recorder = AccessRecorder()
        self._places = Places(self._recorder) if request.device == "cuda" else None

    def run(self) -> None:
        """Run the program to its end, and write the trace and the result."""
        self._install()
        with contextlib.ExitStack() as stack:
            for manager in self._modes():
                stack.enter_context(manager)
            self._execute()
        self._over.set()
        if not self.result.message:
            write_trace(self._trace(), Path(self.request.folder, "step.trace"))
        self._leave()

    def _modes(self) -> list[Any]:
        request = self.request
        emulation = emulate_device(request.device, capability=request.capability)
        names = [accept_cuda_names()] if self._places is None else [self._places, DeviceNames(self._places)]
        reads = ValueReads(self.result.decisions, self.result.numbers), finite_numbers()
        return [ValuelessMode(), emulation, self._recorder, *names, *reads, _Checking(self._ending)]

    def _install(self) -> None:
        """Patch PyTorch for the rest of the process."""
        request, result = self.request, self.result
        sys.meta_path.insert(0, AfterImport(generation.end_at_length, generation.MODULES))
        redirection = Redirection(Path(request.folder, "checkpoints"), [], result.notes)
        redirection.patch_files()
        redirection.patch_torch()
        torch.distributions.Distribution.set_default_validate_args(False)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._before_module)
        loader: Any = DataLoader
        loader._get_iterator = _in_this_process
        FakeTensor.tolist = _known_list(FakeTensor.tolist)
        torch.save = self._skip_save
        for holder, name in ((torch, "compile"), (nn.Module, "compile")):
            setattr(holder, name, self._eager(f"{'torch' if holder is torch else 'Module'}.compile"))

    def _execute(self) -> None:
        """Run the script, and note how it ends."""
        request, result = self.request, self.result
        sys.argv = [request.path, *request.arguments]
        sys.path[0] = str(Path(request.path).resolve().parent)
        result.ended = "program"
        keep_source(request.path)
        self._last_step = time.monotonic()  # PyTorch's own imports may have taken long
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_path(request.path, run_name="__main__")
        except RehearsalEnd:
            result.ended = "steps" if result.ended == "program" else result.ended
        except SystemExit as error:
            if error.code not in (None, 0):
                hint = ": give its arguments behind --" if error.code == 2 else ""
                self._fail(error, f"ends itself ({error.code}){hint}")
        except SyntaxError as error:
            self._fail(error, str(error.msg), f"{error.filename or request.path}:{error.lineno}")
        except BaseException as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
            valueless = any(sign in text for sign in _VALUES)
            self._fail(error, text + "; tensors have no values here" * valueless)

    def _fail(self, error: BaseException, message: str, line: str = "") -> None:
        places = [own_line(frame, number) for frame, number in traceback.walk_tb(error.__traceback__)]
        self.result.ended, self.result.message = "error", message
        self.result.line = line or next(filter(None, reversed(places)), "")

    # --- the end

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        closure = inspect.signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            self._refuse(_CLOSURE.format(type(optimizer).__name__))

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._refuse(_THREAD)
        self._last_step = time.monotonic()
        if self._places is not None:
            self._recorder.own("host", host_counts(optimizer))
        steps = self._optimizers.get(id(optimizer), (optimizer, 0))[1] + 1
        self._optimizers[id(optimizer)] = optimizer, steps
        self.result.steps = max(count for _, count in self._optimizers.values())
        fewest = min(count for _, count in self._optimizers.values())
        if fewest >= self.request.steps or steps >= 16 * self.request.steps:
            self._ignored += 1
            if self._ignored > _MOST_IGNORED:
                self._refuse(_STUBBORN)
            for module in [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]:
                self._recorder.own("parameters", module.parameters())  # also of models that are not called
            if id(optimizer) == next(iter(self._optimizers)):
                self._recorder.detected_step()  # the recorder's own hook does not see this step
            raise RehearsalEnd

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and any(
            True for _ in module.parameters()
        ):
            self._refuse(_THREAD)

    def _watch(self) -> None:
        """End a program that makes no step for too long; its process, if as long again is not enough."""
        while time.monotonic() - self._last_step < self.request.seconds:
            if self._over.wait(0.1):
                return
        main = threading.main_thread().ident or 0
        self.result.line = program_line(sys._current_frames().get(main))
        self.result.ended = "seconds"
        self._ending.request()
        if not self._over.wait(self.request.seconds):
            self.result.ended, self.result.message = "error", _STUBBORN
            self._leave()

    def _refuse(self, reason: str) -> None:
        """End the process at once: the program cannot be tried."""
        self.result.ended, self.result.message = "error", reason
        self.result.line = program_line(sys._getframe(2))
        self._leave()

    def _leave(self) -> None:
        """End the process, whose exit handlers might need values."""
        self.result.write(self.request.folder)
        sys.stdout.flush()
        os._exit(0)

    def _trace(self) -> Trace:
        """Return the trace of the device's buffers."""
        trace = self._recorder.trace()
        host = trace.category[trace.births] == (trace.names.index("host") if "host" in trace.names else -2)
        if self._places is not None:
            host |= self._places.on_host(trace)
        keep = ~(host & trace.of_buffers)
        metadata = dict(trace.metadata) | {"clock": "none"}
        columns = {name: getattr(trace, name)[keep] for name in COLUMNS}
        return dataclasses.replace(trace, **columns, metadata=metadata)

    # --- replacements of functions

    def _skip_save(self, _: Any, path: Any = "", *__: Any, **___: Any) -> None:
        note = (
            f"torch.save({os.fspath(path)!r}) was passed over" if isinstance(path, (str, os.PathLike)) else ""
        )
        if note and note not in self.result.notes:
            self.result.notes.append(note)

    def _eager(self, name: str) -> Any:
        def compile_(model: Any = None, *_: Any, **__: Any) -> Any:
            line = own_line(sys._getframe(1), sys._getframe(1).f_lineno)
            if line or isinstance(model, nn.Module):
                note = f"{name} at {line or program_line(sys._getframe(1))} is left out: {EAGER}"
                if note not in self.result.notes:
                    self.result.notes.append(note)
            return (lambda function: function) if model is None else model

        return compile_


def _known_list(tolist: Any) -> Any:
    """Return the method with the values of a tensor whose values are known, without a tensor for each."""

    @functools.wraps(tolist)
    def known(tensor: Any) -> Any:
        if tensor.constant is None:
            return tolist(tensor)
        with _disable_current_modes():
            return tensor.constant.tolist()

    return known


class _Checking(TorchFunctionMode):
    """Function mode that ends the program at its next operation, once its time is over."""

    def __init__(self, ending: Ending) -> None:
        super().__init__()
        self._ending = ending

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._ending.check()
        return func(*args, **(kwargs or {}))


class _Batches(_SingleProcessDataLoaderIter):
    """Iterator over batches without memory; indices are real, since a sampler needs values."""

    def _next_index(self) -> Any:
        with _disable_current_modes():
            return super()._next_index()


def _in_this_process(loader: Any) -> Any:
    """Load data in this process, since tensors without memory cannot go to another one."""
    loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    with _disable_current_modes():
        return _Batches(loader)


def main(text: str) -> None:
    """Run the program of a request in JSON to its end, and end the process."""
    given: dict[str, Any] = json.loads(text)
    given |= {"arguments": tuple(given["arguments"]), "capability": tuple(given["capability"])}
    _Program(Request(**given)).run()


if __name__ == "__main__":
    main(sys.argv[1])

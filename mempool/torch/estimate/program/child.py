"""The tried program's process: PyTorch on tensors without memory, recorded until the program ends."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib.util
import inspect
import json
import linecache
import math
import os
import runpy
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.dataloader import DataLoader, _SingleProcessDataLoaderIter

from mempool.cli.run.child import AfterImport
from mempool.recording.torch import AccessRecorder
from mempool.rehearsal import generation
from mempool.rehearsal.checkpoints import Redirection
from mempool.rehearsal.child import own_line, program_line
from mempool.torch.estimate.device.emulation import accept_cuda_names, emulate_device
from mempool.torch.estimate.fake.copies import EAGER
from mempool.torch.estimate.fake.fake_run import HOST, host_counts, without_host
from mempool.torch.estimate.fake.mode import ValuelessMode
from mempool.torch.estimate.program.run import Request, Result
from mempool.torch.estimate.program.value_reads import ValueReads, finite_numbers
from mempool.torch.estimate.result import RECURRENT
from traces.formats.parquet import write_trace

if TYPE_CHECKING:
    from types import FrameType

    from traces import Trace

_CLOSURE = "{} calls the model as often as values say"
_THREAD = "it runs a model in another thread, where nothing is recorded"
_NO_STEP = "no optimizer step within {:g} s"
#: Signs of errors of tensors without values.
_VALUES = ("DataDependent", "DynamicOutputShape", "FakeTensor", "for tensor subclasses", "meta tensor")


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
        self._recorder = AccessRecorder()

    def run(self) -> NoReturn:
        """Run the program to its end, or for some steps, and write the trace and the result."""
        self._install()
        with contextlib.ExitStack() as stack:
            for manager in self._modes():
                stack.enter_context(manager)
            self._execute()
        self._finish()

    def _modes(self) -> list[Any]:
        request = self.request
        emulation = emulate_device(request.device, capability=request.capability, warn=self._note)
        reads = ValueReads(self.result.decisions, self.result.numbers), finite_numbers()
        return [ValuelessMode(), emulation, self._recorder, accept_cuda_names(), *reads]

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
        request = self.request
        sys.argv = [request.path, *request.arguments]
        sys.path[0] = str(Path(request.path).resolve().parent)
        keep_source(request.path)
        self._last_step = time.monotonic()  # PyTorch's own imports may have taken long
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_path(request.path, run_name="__main__")
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
        self.result.message = message
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
        if self.request.device == "cuda":
            self._recorder.own(HOST, host_counts(optimizer))
        steps = self._optimizers.get(id(optimizer), (optimizer, 0))[1] + 1
        self._optimizers[id(optimizer)] = optimizer, steps
        fewest = min(count for _, count in self._optimizers.values())
        if fewest >= self.request.steps or steps >= 16 * self.request.steps:
            if id(optimizer) == next(iter(self._optimizers)):
                self._recorder.detected_step()  # the recorder's own hook does not see this step
            self._finish()

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if self.request.device == "cuda" and isinstance(module, nn.RNNBase):
            self._note(RECURRENT)
        if threading.current_thread() is not threading.main_thread() and any(
            True for _ in module.parameters()
        ):
            self._refuse(_THREAD)

    def _watch(self) -> None:
        """End a program that makes no step for too long."""
        while (left := self._last_step + self.request.seconds - time.monotonic()) > 0:
            time.sleep(min(left, self.request.seconds))
        main = threading.main_thread().ident or 0
        self._refuse(_NO_STEP.format(self.request.seconds), sys._current_frames().get(main))

    def _refuse(self, reason: str, frame: FrameType | None = None) -> NoReturn:
        """End the process at once: the program cannot be tried."""
        self.result.message = reason
        self.result.line = program_line(frame or sys._getframe(2))
        self._finish()

    def _finish(self) -> NoReturn:
        """Write the trace and the result, and end the process, whose exit handlers might need values."""
        self._last_step = math.inf
        if not self.result.message:
            with _disable_current_modes():
                for module in [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]:
                    self._recorder.own("parameters", module.parameters())  # also of models without a call
                write_trace(self._trace(), Path(self.request.folder, "step.trace"))
        self.result.write(self.request.folder)
        sys.stdout.flush()
        os._exit(0)

    def _trace(self) -> Trace:
        """Return the trace of the device's buffers."""
        trace = without_host(self._recorder.trace())
        return dataclasses.replace(trace, metadata=dict(trace.metadata) | {"clock": "none"})

    # --- replacements of functions

    def _note(self, text: str) -> None:
        if text not in self.result.notes:
            self.result.notes.append(text)

    def _skip_save(self, _: Any, path: Any = "", *__: Any, **___: Any) -> None:
        if isinstance(path, (str, os.PathLike)):
            self._note(f"torch.save({os.fspath(path)!r}) was passed over")

    def _eager(self, name: str) -> Any:
        def compile_(model: Any = None, *_: Any, **__: Any) -> Any:
            line = own_line(sys._getframe(1), sys._getframe(1).f_lineno)
            if line or isinstance(model, nn.Module):
                self._note(f"{name} at {line or program_line(sys._getframe(1))} is left out: {EAGER}")
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


def keep_source(path: str) -> None:
    """Keep the source of a script, whose lines are then known even if the script changes directory."""
    source = Path(path).read_bytes()
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # reported when the source is compiled
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        linecache.cache[path] = len(source), None, lines, path


def main(text: str) -> None:
    """Run the program of a request in JSON to its end, and end the process."""
    given: dict[str, Any] = json.loads(text)
    given |= {"arguments": tuple(given["arguments"]), "capability": tuple(given["capability"])}
    _Program(Request(**given)).run()


if __name__ == "__main__":
    main(sys.argv[1])

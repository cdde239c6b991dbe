"""Process of a program on tensors without memory, which records the program until its end."""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import runpy
import sys
import threading
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data.dataloader import DataLoader, _SingleProcessDataLoaderIter

from mempool.cli.run.child import AfterImport
from mempool.recording.torch import AccessRecorder
from mempool.rehearsal import generation
from mempool.rehearsal.child import Rehearsal
from mempool.rehearsal.job import Job
from mempool.rehearsal.program_lines import own_line, program_line
from mempool.rehearsal.value_reads import note
from mempool.torch.estimate.device.emulation import accept_cuda_names, emulate_device
from mempool.torch.estimate.fake.mode import ValuelessMode
from mempool.torch.estimate.program.run import OUTCOME, TRACE, ProgramOutcome
from mempool.torch.estimate.result import RECURRENT
from traces.formats.parquet import write_trace

if TYPE_CHECKING:
    from types import TracebackType

_EAGER = "the result is of the eager model, and a compiled one may need more or less"
_THREAD = "it runs a model in another thread, where nothing is recorded"
#: Modules with functions that write models.
_MODELS, _TENSORS = "transformers.modeling_utils", "safetensors.torch"
#: Texts in errors of tensors without values.
_VALUES = ("DataDependent", "DynamicOutputShape", "FakeTensor", "for tensor subclasses", "meta tensor")


class _Program(Rehearsal):
    """A program on tensors without memory, and its steps, hangs and errors, as in a rehearsal.

    Attributes:
        outcome: the result so far.
    """

    outcome: ProgramOutcome

    def __init__(self, job: Job, device: str, capability: tuple[int, int]) -> None:
        super().__init__(job)
        self.outcome = ProgramOutcome("")
        self._device, self._capability = device, capability
        self._recorder = AccessRecorder()

    def run(self) -> NoReturn:
        """Run the program for some steps or to its end, and write the trace and the result."""
        self._install()
        with (
            ValuelessMode() as mode,
            emulate_device(self._device, capability=self._capability, warn=self._note),
            self._recorder,
            accept_cuda_names(),
        ):
            mode.on_read = functools.partial(read_zero, self.outcome)
            register_optimizer_step_post_hook(self._after_step)  # after the recorder's hook
            self._execute()
        self._leave()

    def _install(self) -> None:
        """Patch PyTorch for the rest of the process."""
        sys.meta_path.insert(0, AfterImport(self._after_import, (*generation.MODULES, _TENSORS, _MODELS)))
        torch.distributions.Distribution.set_default_validate_args(False)
        register_module_forward_pre_hook(self._before_module)
        self._note_optimizers(torch)
        loader: Any = DataLoader
        loader._get_iterator = _in_this_process
        torch.save = self._skipped_save("torch.save")
        torch.compile = nn.Module.compile = self._left_out()

    def _after_import(self, name: str) -> None:
        if name == _MODELS:
            sys.modules[name].PreTrainedModel.save_pretrained = self._skipped_save("save_pretrained")
        elif name == _TENSORS:
            sys.modules[name].save_file = self._skipped_save("save_file")  # type: ignore[attr-defined]
        else:
            generation.end_at_length(name)

    def _execute(self) -> None:
        """Run the script, and record its outcome."""
        path = self.job.program[0]
        sys.argv = list(self.job.program)
        sys.path[0] = str(Path(path).resolve().parent)
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_path(path, run_name="__main__")
        except BaseException as error:
            if not isinstance(error, SystemExit) or error.code not in (None, 0):
                self._note_error(type(error), error, error.__traceback__)

    def _note_error(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> bool:
        super()._note_error(kind, error, trace)
        text = self.outcome.message[:500]
        if isinstance(error, SystemExit):
            hint = ": give its arguments behind --" if error.code == 2 else ""
            text = f"ends itself ({error.code}){hint}"
        elif any(sign in text for sign in _VALUES):
            text += "; tensors have no values here"
        self.outcome.message = text
        return True

    def _before_module(self, module: nn.Module, _: Any) -> None:
        if self._device == "cuda" and isinstance(module, nn.RNNBase):
            self._note(RECURRENT)
        if threading.current_thread() is not threading.main_thread() and any(
            True for _ in module.parameters()
        ):
            self.outcome.ended, self.outcome.message = "error", _THREAD
            self.outcome.line = program_line(sys._getframe(1))
            self._ended = True
            self._leave()

    def _note_hang(self) -> None:
        super()._note_hang()
        self.outcome.message = f"no optimizer step within {self.job.timeout:g} s"

    def _end(self) -> NoReturn:
        """End the process at once, since exit handlers might need values."""
        self._ended, self.outcome.ended = True, "steps"
        self._leave()

    def _write(self) -> None:
        """Write the trace and the result."""
        if self.outcome.complete:
            with _disable_current_modes():
                for module in [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]:
                    self._recorder.own("parameters", module.parameters())  # also of models without a call
                trace = self._recorder.trace()
                trace = dataclasses.replace(trace, metadata=dict(trace.metadata) | {"clock": "none"})
                write_trace(trace, self._folder / TRACE)
        self.outcome.write(self._folder / OUTCOME)

    # --- replacements of functions

    def _note(self, text: str) -> None:
        if text not in self.outcome.notes:
            self.outcome.notes.append(text)

    def _skipped_save(self, name: str) -> Any:
        def skip(_: Any, path: Any = "", *__: Any, **___: Any) -> None:
            if isinstance(path, (str, os.PathLike)):
                self._note(f"{name}({os.fspath(path)!r}) was passed over")

        return skip

    def _left_out(self) -> Any:
        def compile_(model: Any = None, *_: Any, **__: Any) -> Any:
            frame = sys._getframe(1)
            if own_line(frame, frame.f_lineno) or isinstance(model, nn.Module):
                self._note(f"compile at {program_line(frame)} is left out: {_EAGER}")
            return (lambda function: function) if model is None else model

        return compile_


def read_zero(outcome: ProgramOutcome, tensor: torch.Tensor) -> Any:
    """Return zero or false as a tensor's value, and count the read by its line of the program."""
    note(outcome.decisions if tensor.dtype is torch.bool else outcome.value_reads, sys._getframe(1))
    with _disable_current_modes():
        return torch.zeros((), dtype=tensor.dtype).item()


class _Batches(_SingleProcessDataLoaderIter):
    """Iterator over batches without memory; indices have values, since a sampler needs values."""

    def _next_index(self) -> Any:
        with _disable_current_modes():
            return super()._next_index()


def _in_this_process(loader: Any) -> Any:
    """Load data in this process, since tensors without memory cannot be sent to other processes."""
    loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    with _disable_current_modes():
        return _Batches(loader)


def main(job: str, device: str, *capability: str) -> NoReturn:
    """Run the program of a job in JSON to its end, and end the process."""
    major, minor = map(int, capability)
    _Program(Job.from_json(job), device, (major, minor)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])

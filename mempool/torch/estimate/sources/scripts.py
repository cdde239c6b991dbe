"""Execution of user scripts and modules such that models cost no memory and nothing is trained."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
import traceback
import types
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from mempool.errors import UsageError
from mempool.torch.estimate.device.emulation import accept_cuda_names, emulate_device, emulated_device
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import fake_mode
from mempool.torch.estimate.options import OPTIONS
from mempool.torch.estimate.sources.call_spy import CallRecord, record_calls
from mempool.torch.estimate.sources.program_control import (
    FirstBackward,
    disable_compilers,
    frames,
    suppress_saves,
    validates_distribution,
)
from mempool.torch.estimate.sources.value_decisions import FiniteNumbers, decision, true_if_finite

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

_VALUES = ("DataDependent", "DynamicOutputShape", "FakeTensor", "for tensor subclasses", "meta tensor")
#: Answers to a program that reads values.
GUESSES = "conditions are taken to be true, and numbers zero"
_GUARD = 'put what runs behind `if __name__ == "__main__":` or name a function, '


class BrokenScriptError(UsageError):
    """Error for a script that cannot be imported."""


@dataclass(frozen=True)
class Loaded:
    """An imported module, and the record of its actions during the import."""

    module: ModuleType
    record: CallRecord


def load_script(path: str, arguments: Sequence[str] = (), *, main: bool = False) -> Loaded:
    """Run a script's module level on tensors without memory, up to the first backward.

    The script's output goes to stderr. The script's folder comes first in ``sys.path``, from now on.

    Args:
        path: of the file.
        arguments: the script's arguments in ``sys.argv``.
        main: whether to run the script as a program, including code under ``if __name__ == "__main__":``.

    Raises:
        OSError: the file cannot be read.
        BrokenScriptError: the script fails, or ends the interpreter; the message says where and why.
    """
    source = Path(path).read_bytes()
    _keep_source(path, source)
    name = "__main__" if main else Path(path).stem
    module = types.ModuleType(name if name not in sys.modules or main else f"{name} of {path}")
    module.__file__ = path
    sys.path.insert(0, str(Path(path).resolve().parent))
    with (
        fake_execution(),
        record_calls() as record,
        _program_environment(path, arguments, module, record),
        _ValueReads(record),
        FiniteNumbers(),
        _explain_failures(path, record, main=main),
        _in_one_thread(path, record, main=main),
    ):
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - intended
    return Loaded(module, record)


def _keep_source(path: str, source: bytes) -> None:
    """Register the source in `linecache`, so that the script may change directory."""
    try:
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
    except (SyntaxError, UnicodeDecodeError):
        return  # reported when the source is compiled
    linecache.cache[path] = len(source), None, lines, path


def load_module(name: str) -> Loaded:
    """Import a module normally, except that the first backward ends the import.

    Raises:
        UsageError: no module has that name.
        BrokenScriptError: the module fails, or trains.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with (
        record_calls() as record,
        _explain_failures(name, record, main=False),
        _in_one_thread(name, record, main=False),
    ):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module {error.name!r} in {Path.cwd()} or among what is installed") from None
    if record.trains:
        raise BrokenScriptError(f"{name} trains when it is imported: {_GUARD}{name}:function")
    return Loaded(module, record)


@contextlib.contextmanager
def fake_execution(device: str | None = None) -> Iterator[None]:
    """Run the block on fake tensors: nothing is written to files, and printed text goes to stderr.

    Args:
        device: "cuda" or "cpu", whose buffers are taken; None: the device of the enclosing block, else
            "cuda". Programs may name "cuda" in either case.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated())
        stack.enter_context(fake_mode())
        stack.enter_context(emulate_device(device or emulated_device() or "cuda"))
        stack.enter_context(accept_cuda_names())
        stack.enter_context(suppress_saves(lambda _: None))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _explain_failures(name: str, record: CallRecord, *, main: bool) -> Iterator[None]:
    """Convert an exception that ends a script to a one-line error; `FirstBackward` is the expected end."""
    try:
        yield
    except FirstBackward:
        return
    except UsageError:
        raise
    except SystemExit as error:
        hint = (
            f"give its arguments behind --, as in {name} --main -- ARGS"
            if main
            else f"{_GUARD}{name}:function"
        )
        hint = _decision_hint(record) or hint
        raise BrokenScriptError(f"{_place(name, error)} ends itself{_code(error)}: {hint}") from None
    except _EndlessReads as error:
        repeated = f"{error} again, as in a loop that another answer would end"
        hint = _without_values(name, main=main)
        raise BrokenScriptError(f"{_place(name, error)}: {repeated}{hint}") from None
    except SyntaxError as error:
        raise BrokenScriptError(f"{error.filename or name}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        hint = (
            _without_values(name, main=main)
            if any(sign in text for sign in _VALUES)
            else _decision_hint(record)
        )
        raise BrokenScriptError(f"{_place(name, error)}: {text}{hint}") from error


@contextlib.contextmanager
def _in_one_thread(name: str, record: CallRecord, *, main: bool) -> Iterator[None]:
    """Refuse a program that trains in another thread, whatever the program does without that thread."""
    try:
        yield
    except (Exception, SystemExit, FirstBackward):
        if not record.elsewhere:
            raise
    if record.elsewhere:
        reason = "it trains in another thread, where it is not seen"
        raise BrokenScriptError(f"{record.elsewhere}: {reason}: {_function_hint(name, main=main)}")


def _without_values(name: str, *, main: bool) -> str:
    return f"; tensors have no values here: {_function_hint(name, main=main)}"


def _decision_hint(record: CallRecord) -> str:
    """Return a hint to the last decision by a value, which may have led to the failure."""
    return (
        f" (behind {record.decisions[-1]}, which decides by a value: {GUESSES})" if record.decisions else ""
    )


def _function_hint(name: str, *, main: bool) -> str:
    return f"{'name a function, ' if main else _GUARD}{name}:function"


def _place(name: str, error: BaseException) -> str:
    """Return the innermost line of the script itself; for a module, the innermost line outside PyTorch."""
    own = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename == name]
    others = [f for f in frames if not f.filename.startswith(("<", own, str(Path(__file__).parent)))]
    last = (mine or others)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else name


def _code(error: SystemExit) -> str:
    return (
        f" (exit code {error.code})"
        if isinstance(error.code, int)
        else f" ({error.code})"
        if error.code
        else ""
    )


@contextlib.contextmanager
def _program_environment(
    path: str, arguments: Sequence[str], module: ModuleType, record: CallRecord
) -> Iterator[None]:
    """Set up a program's environment: arguments, empty stdin, one process, no compilers."""
    loader: Any = torch.utils.data.DataLoader
    stdin, argv, iterator = sys.stdin, sys.argv, loader._get_iterator
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    sys.argv = [path, *arguments]
    loader._get_iterator = _in_this_process
    try:
        with open(os.devnull) as sys.stdin, disable_compilers(record.leave_eager):  # noqa: PTH123
            yield
    finally:
        sys.stdin, sys.argv, loader._get_iterator = stdin, argv, iterator
        if before is not None:
            sys.modules[module.__name__] = before


def _in_this_process(loader: Any) -> Any:
    """Load data in this process, since fake tensors cannot go to another one."""
    loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    with _disable_current_modes():
        return _Batches(loader)


class _ValueReads(TorchDispatchMode):
    """Dispatch mode that answers a script's reads: zero for floating values, True for conditions.

    Conditions on NaN and infinity get the answer for finite numbers; if another answer decides on the course
    of the program, the line is recorded. Whole numbers become sizes, so a script that reads one is refused;
    and so is a model's own step that reads any value, since the step runs without this mode. A line that
    reads without end is refused, too: the loop may wait for an answer that never comes.
    """

    def __init__(self, record: CallRecord) -> None:
        super().__init__()
        self._seen = record
        self._reads: Counter[tuple[str, int, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            dtype = args[0].dtype
            if (truth := true_if_finite(args[0])) is not None:
                return truth
            if dtype is torch.bool or dtype.is_floating_point:
                self._count(condition=dtype is torch.bool)
                return True if dtype is torch.bool else 0.0
        return func(*args, **(kwargs or {}))

    def _count(self, *, condition: bool) -> None:
        stack = frames()
        for frame in stack[:1]:
            line = frame.f_code.co_filename, frame.f_lineno, condition
            if line not in self._reads and not validates_distribution():
                self._seen.decide(decision(stack))
            self._reads[line] += 1
            if self._reads[line] > (OPTIONS.condition_reads if condition else OPTIONS.number_reads):
                raise _EndlessReads(
                    f"a condition that was true {OPTIONS.condition_reads:,} times is asked"
                    if condition
                    else f"a number that was zero {OPTIONS.number_reads:,} times is read"
                )


class _EndlessReads(BaseException):
    """Signal of a line that reads values without end; not an Exception, so that few programs catch this."""


class _Batches(_SingleProcessDataLoaderIter):
    """Iterator over batches without memory; indices are real, since a sampler needs values."""

    def _next_index(self) -> Any:
        with _disable_current_modes():
            return super()._next_index()

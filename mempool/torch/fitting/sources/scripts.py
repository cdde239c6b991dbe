"""Scripts and modules of others, imported so that models cost no memory and nothing is trained."""

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
from mempool.torch.fitting.fake import fake_mode
from mempool.torch.fitting.isolation import isolated
from mempool.torch.fitting.sources.compilers import uncompiled
from mempool.torch.fitting.sources.decisions import decision
from mempool.torch.fitting.sources.finite import FiniteNumbers, true_if_finite
from mempool.torch.fitting.sources.savers import unsaved
from mempool.torch.fitting.sources.stops import Trains, frames, validates_distribution
from mempool.torch.fitting.sources.watched import Seen, watched
from mempool.torch.fitting.target.as_on import as_on, cuda_is_here, device_around

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

_VALUES = ("DataDependent", "DynamicOutputShape", "FakeTensor", "for tensor subclasses", "meta tensor")
#: Values that a line of a program may read, more than steps or samples that one looks at before training.
#: A loop that is to end by another answer has none; numbers come also from each sample of a large data set.
_CONDITIONS, _NUMBERS = 10_000, 100_000
#: Answers to a program that reads values.
GUESSES = "conditions are taken to be true, and numbers zero"
_GUARD = 'put what runs behind `if __name__ == "__main__":` or name a function, '


class BrokenScriptError(UsageError):
    """A script that cannot be imported."""


@dataclass(frozen=True)
class Loaded:
    """A module that was imported, and what it did meanwhile."""

    module: ModuleType
    seen: Seen


def load_script(path: str, arguments: Sequence[str] = (), *, main: bool = False) -> Loaded:
    """Run a script's module level on tensors that have no memory, up to the first backward.

    What it prints goes to stderr. Its folder comes first in ``sys.path``, from now on.

    Args:
        path: of the file.
        arguments: what it finds in ``sys.argv`` behind its name.
        main: as a program: what it does under ``if __name__ == "__main__":`` too.

    Raises:
        OSError: it cannot be read.
        BrokenScriptError: it fails, or ends the interpreter; the line says where and why.
    """
    source = Path(path).read_bytes()
    _keep_source(path, source)
    name = "__main__" if main else Path(path).stem
    module = types.ModuleType(name if name not in sys.modules or main else f"{name} of {path}")
    module.__file__ = path
    sys.path.insert(0, str(Path(path).resolve().parent))
    with (
        unreal(),
        watched() as seen,
        _started(path, arguments, module, seen),
        _Values(seen),
        FiniteNumbers(),
        _told(path, seen, main=main),
        _in_one_thread(path, seen, main=main),
    ):
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - what it is for
    return Loaded(module, seen)


def _keep_source(path: str, source: bytes) -> None:
    """Let `linecache` have the source by the name that frames have, wherever the script changes to."""
    try:
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
    except (SyntaxError, UnicodeDecodeError):
        return  # told when it is compiled
    linecache.cache[path] = len(source), None, lines, path


def load_module(name: str) -> Loaded:
    """Import a module as everybody does, but for training: its first backward ends it.

    Raises:
        UsageError: there is none of that name.
        BrokenScriptError: it fails, or trains.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with watched() as seen, _told(name, seen, main=False), _in_one_thread(name, seen, main=False):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module {error.name!r} in {Path.cwd()} or among what is installed") from None
    if seen.trains:
        raise BrokenScriptError(f"{name} trains when it is imported: {_GUARD}{name}:function")
    return Loaded(module, seen)


@contextlib.contextmanager
def unreal(device: str | None = None) -> Iterator[None]:
    """Tensors have no memory in the block nor go to files, and what is printed goes to stderr.

    Args:
        device: "cuda" or "cpu", whose buffers are taken; None: that of the block around, else "cuda".
            Programs may name "cuda" in either case.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated())
        stack.enter_context(fake_mode())
        stack.enter_context(as_on(device or device_around() or "cuda"))
        stack.enter_context(cuda_is_here())
        stack.enter_context(unsaved(lambda _: None))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def _told(name: str, seen: Seen, *, main: bool) -> Iterator[None]:
    """What ends a script as a line; that it began to train is its good end."""
    try:
        yield
    except Trains:
        return
    except UsageError:
        raise
    except SystemExit as error:
        hint = (
            f"give its arguments behind --, as in {name} --main -- ARGS"
            if main
            else f"{_GUARD}{name}:function"
        )
        hint = _behind(seen) or hint
        raise BrokenScriptError(f"{_place(name, error)} ends itself{_code(error)}: {hint}") from None
    except _AsksOn as error:
        asked = f"{error} again, as in a loop that another answer would end"
        hint = _without_values(name, main=main)
        raise BrokenScriptError(f"{_place(name, error)}: {asked}{hint}") from None
    except SyntaxError as error:
        raise BrokenScriptError(f"{error.filename or name}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        hint = _without_values(name, main=main) if any(sign in text for sign in _VALUES) else _behind(seen)
        raise BrokenScriptError(f"{_place(name, error)}: {text}{hint}") from error


@contextlib.contextmanager
def _in_one_thread(name: str, seen: Seen, *, main: bool) -> Iterator[None]:
    """A program of which another thread trains is refused, whatever becomes of it without that thread."""
    try:
        yield
    except (Exception, SystemExit, Trains):
        if not seen.elsewhere:
            raise
    if seen.elsewhere:
        what = "it trains in another thread, where it is not seen"
        raise BrokenScriptError(f"{seen.elsewhere}: {what}: {_instead(name, main=main)}")


def _without_values(name: str, *, main: bool) -> str:
    return f"; tensors have no values here: {_instead(name, main=main)}"


def _behind(seen: Seen) -> str:
    """The decision that may have led a program to its failure."""
    return f" (behind {seen.decisions[-1]}, which decides by a value: {GUESSES})" if seen.decisions else ""


def _instead(name: str, *, main: bool) -> str:
    return f"{'name a function, ' if main else _GUARD}{name}:function"


def _place(name: str, error: BaseException) -> str:
    """The innermost line of the script itself, of a module the innermost at all that is not PyTorch's."""
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
def _started(path: str, arguments: Sequence[str], module: ModuleType, seen: Seen) -> Iterator[None]:
    """As a program that was started so, in one process, that nobody answers, and that compiles nothing."""
    loader: Any = torch.utils.data.DataLoader
    stdin, argv, iterator = sys.stdin, sys.argv, loader._get_iterator
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    sys.argv = [path, *arguments]
    loader._get_iterator = _in_this_process
    try:
        with open(os.devnull) as sys.stdin, uncompiled(seen.leave_eager):  # noqa: PTH123
            yield
    finally:
        sys.stdin, sys.argv, loader._get_iterator = stdin, argv, iterator
        if before is not None:
            sys.modules[module.__name__] = before


def _in_this_process(loader: Any) -> Any:
    """Tensors without memory go to no other process."""
    loader.num_workers, loader.timeout, loader.pin_memory = 0, 0, False
    with _disable_current_modes():
        return _Batches(loader)


class _Values(TorchDispatchMode):
    """Answers a script that reads a floating value with zero, and one that asks a condition with True.

    Conditions on NaN and infinity come out as of finite numbers; where another answer decides on the course
    of the program, its line is told. Whole numbers become sizes, so that a script that reads one is refused;
    and so is a model's own step that reads any, since it runs without this. A line that goes on asking is
    refused, too: it may wait for what never comes.
    """

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen
        self._asked: Counter[tuple[str, int, bool]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].constant is None:
            kind = args[0].dtype
            if (truth := true_if_finite(args[0])) is not None:
                return truth
            if kind is torch.bool or kind.is_floating_point:
                self._count(condition=kind is torch.bool)
                return True if kind is torch.bool else 0.0
        return func(*args, **(kwargs or {}))

    def _count(self, *, condition: bool) -> None:
        there = frames()
        for frame in there[:1]:
            line = frame.f_code.co_filename, frame.f_lineno, condition
            if line not in self._asked and not validates_distribution():
                self._seen.decide(decision(there))
            self._asked[line] += 1
            if self._asked[line] > (_CONDITIONS if condition else _NUMBERS):
                raise _AsksOn(
                    f"a condition that was true {_CONDITIONS:,} times is asked"
                    if condition
                    else f"a number that was zero {_NUMBERS:,} times is read"
                )


class _AsksOn(BaseException):
    """A line has read values all the time; no Exception, so that few programs catch it and ask again."""


class _Batches(_SingleProcessDataLoaderIter):
    """Batches without memory, of indices that are real: a sampler wants values."""

    def _next_index(self) -> Any:
        with _disable_current_modes():
            return super()._next_index()

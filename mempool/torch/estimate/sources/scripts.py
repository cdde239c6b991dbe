"""Import of user scripts and modules such that the models in them cost no memory."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mempool.errors import UsageError
from mempool.torch.estimate.device.emulation import accept_cuda_names, allow_fake_tensors
from mempool.torch.estimate.failures import BrokenScriptError
from mempool.torch.estimate.fake.isolation import isolated
from mempool.torch.estimate.fake.mode import fake_mode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

_GUARD = 'put what runs behind `if __name__ == "__main__":`'


def load_script(path: str) -> ModuleType:
    """Import a script by its path, on tensors without memory.

    The script's output goes to stderr. The script's folder comes first in ``sys.path``, from now on.

    Raises:
        OSError: the file cannot be read.
        BrokenScriptError: the script fails, trains, or ends the interpreter; the message says where and why.
    """
    source = keep_source(path)
    name = Path(path).stem
    module = types.ModuleType(name if name not in sys.modules else f"{name} of {path}")
    module.__file__ = path
    sys.path.insert(0, str(Path(path).resolve().parent))
    sys.modules[module.__name__] = module
    argv, sys.argv = sys.argv, [path]
    try:
        with fake_execution(), without_training(), _explain_failures(path):
            exec(compile(source, path, "exec", dont_inherit=True), vars(module))  # noqa: S102 - intended
    finally:
        sys.argv = argv
    return module


def keep_source(path: str) -> bytes:
    """Return the source of a script, whose lines are then known even if the script changes directory."""
    source = Path(path).read_bytes()
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):  # reported when the source is compiled
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        linecache.cache[path] = len(source), None, lines, path
    return source


def load_module(name: str) -> ModuleType:
    """Import a module.

    Raises:
        UsageError: no module has that name.
        BrokenScriptError: the module fails, or trains.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    with without_training(), _explain_failures(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module {error.name!r} in {Path.cwd()} or among what is installed") from None


@contextlib.contextmanager
def fake_execution() -> Iterator[None]:
    """Run the block on fake tensors: `torch.save` empties no file, and printed text goes to stderr.

    Programs may name the device "cuda".
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated())
        stack.enter_context(fake_mode())
        stack.enter_context(allow_fake_tensors())
        stack.enter_context(accept_cuda_names())
        stack.callback(setattr, torch, "save", torch.save)
        torch.save = lambda *_, **__: None
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


@contextlib.contextmanager
def without_training() -> Iterator[None]:
    """Refuse a backward pass in the block."""

    def trains(*_: Any, **__: Any) -> None:
        own = ("<", str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
        frame = [f for f in traceback.extract_stack() if not f.filename.startswith(own)][-1]
        reason = "it trains where a model is looked for"
        remedy = "name a function that only makes the model, or run a script as a program, with --main"
        raise BrokenScriptError(f"{frame.filename}:{frame.lineno}: {reason}; {remedy}")

    before, torch.autograd.backward = torch.autograd.backward, trains
    try:
        yield
    finally:
        torch.autograd.backward = before


@contextlib.contextmanager
def _explain_failures(name: str) -> Iterator[None]:
    """Convert an exception that ends an import to a one-line error."""
    try:
        yield
    except UsageError:
        raise
    except SystemExit as error:
        code = f" ({error.code})" if error.code else ""
        raise BrokenScriptError(f"{_place(name, error)} ends itself{code}: {_GUARD}") from None
    except SyntaxError as error:
        raise BrokenScriptError(f"{error.filename or name}:{error.lineno}: {error.msg}") from None
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise BrokenScriptError(f"{_place(name, error)}: {text}") from error


def _place(name: str, error: BaseException) -> str:
    """Return the innermost line of the script itself; for a module, the innermost line outside PyTorch."""
    own = str(Path(torch.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    mine = [f for f in frames if f.filename == name]
    others = [f for f in frames if not f.filename.startswith(("<", own, str(Path(__file__).parent)))]
    last = (mine or others)[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else name

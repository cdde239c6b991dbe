"""Control of a program during a trial: abort at the first backward, no compilation, no saved files."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mempool.torch.estimate.sources.value_decisions import INSTALLED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


_DISTRIBUTIONS = str(Path(torch.distributions.__file__).parent)
_HERE = str(Path(__file__).parent)
_OTHERS = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), str(contextlib.__file__), "<")


class FirstBackward(BaseException):
    """Signal of a program's first backward; not an Exception, so that few programs catch this signal.

    If the program catches and drops this one nevertheless, the next line of the program raises another,
    outside of the `try` that caught the first: a loop around a bare `except:` comes to an end.
    """

    def __init__(self, on_stop: Callable[[], object]) -> None:
        super().__init__()
        self._on_stop = on_stop

    def __del__(self) -> None:
        """Raise again at the next line, unless the program has ended and no frame is left."""
        if stack := frames():
            self._on_stop()
            stop_at_next_line(self._on_stop, stack)


def stop_at_next_line(on_stop: Callable[[], object], stack: list[FrameType] | None = None) -> None:
    """Raise `FirstBackward` at the next line of the program. Sets the trace function of this thread."""

    def line(_frame: Any, event: str, _argument: Any) -> Any:
        if event == "line":
            raise FirstBackward(on_stop)  # Python forgets the trace function hereby
        return line

    for frame in frames() if stack is None else stack:
        frame.f_trace = line
    sys.settrace(lambda *_: None)


def frames() -> list[FrameType]:
    """Return the frames of the program run by `load_script` or `load_module`, innermost first.

    Frames of PyTorch and of this package are left out.
    """
    found: list[FrameType] = []
    for frame in _stack():
        name = frame.f_code.co_filename
        if name.startswith(_HERE) and frame.f_code.co_name in ("load_script", "load_module"):
            return found
        if not name.startswith(_OTHERS):
            found.append(frame)
    return []


def place() -> str:
    """Return file and line of this thread's innermost frame outside PyTorch and this package."""
    stack = (frame for frame in _stack() if not frame.f_code.co_filename.startswith(_OTHERS))
    return next((f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in stack), "")


def validates_distribution() -> bool:
    """Return whether a distribution of PyTorch is validating its parameters, which are assumed valid."""
    return any(frame.f_code.co_filename.startswith(_DISTRIBUTIONS) for frame in _stack())


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


#: Savers by module; NumPy's are skipped only for calls with tensors, and may write real arrays.
_SAVERS = {
    "torch": ("save",),
    "torch.serialization": ("save",),
    "torch.jit": ("save",),
    "safetensors.torch": ("save_file", "save_model"),
    "numpy": ("save", "savez", "savez_compressed", "savetxt"),
}


@contextlib.contextmanager
def suppress_saves(on_skip: Callable[[str], object]) -> Iterator[None]:
    """Leave files alone in the block: most savers open, and so empty, a file before reading the tensor.

    Args:
        on_skip: called with the name of each saver that is skipped.
    """
    with contextlib.ExitStack() as stack:
        for where, names in _SAVERS.items():
            if importlib.util.find_spec(where.partition(".")[0]) is None:
                continue
            module = importlib.import_module(where)
            for name in names:
                before = getattr(module, name)
                stack.callback(setattr, module, name, before)
                setattr(module, name, _instead(before, f"{where}.{name}", on_skip))
        yield


def _instead(save: Callable[..., Any], name: str, on_skip: Callable[[str], object]) -> Callable[..., Any]:
    real = name.startswith("numpy.")

    @functools.wraps(save)
    def passed_over(*args: Any, **kwargs: Any) -> Any:
        if real and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return save(*args, **kwargs)
        on_skip(name)
        return None

    return passed_over


_TORCHSCRIPT = ("script", "trace", "trace_module", "freeze", "optimize_for_inference")


@contextlib.contextmanager
def disable_compilers(on_skip: Callable[[str], object]) -> Iterator[None]:
    """Disable compilation in the block.

    Args:
        on_skip: called with each `torch.compile` that is skipped, and its line; not for compilations that
            libraries make for themselves.
    """
    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "compile", _noting(on_skip, "torch.compile", _eager)),
        (nn.Module, "compile", _noting(on_skip, "Module.compile", lambda *_, **__: None)),
        *((torch.jit, name, _eager) for name in _TORCHSCRIPT),
    ]
    with contextlib.ExitStack() as stack:
        for holder, name, function in instead:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, function)
        yield


def _noting(on_skip: Callable[[str], object], called: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    def passed_over(*args: Any, **kwargs: Any) -> Any:
        own_frames = [
            frame for frame in frames() if not any(part in frame.f_code.co_filename for part in INSTALLED)
        ]
        module = any(isinstance(argument, nn.Module) for argument in (*args, *kwargs.values()))
        if module or place().startswith(tuple(frame.f_code.co_filename for frame in own_frames[:1])):
            where = f"{own_frames[0].f_code.co_filename}:{own_frames[0].f_lineno}" if own_frames else place()
            on_skip(f"{called} at {where}")
        return instead(*args, **kwargs)

    return passed_over


def _eager(model: Any = None, *_: Any, **given: Any) -> Any:
    """Replace `torch.compile`, which is also a decorator with options, and TorchScript's functions."""
    for name in ("obj", "func", "mod"):
        model = given.get(name, model)
    return (lambda function: function) if model is None else model

"""Conversion of failures of a fake run to one-line errors."""

from __future__ import annotations

import contextlib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch._subclasses import fake_tensor

import mempool
import traces
from mempool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

_DATA = (
    "what follows depends on data, unknown before the run; try the model without it: shapes that do "
    "not depend on values, torch.where instead of masks"
)
_REMEDIES: tuple[tuple[str, str], ...] = (
    ("UninitializedParameter", "lazy modules: give the model after it was called once with an input"),
    (
        ".numpy() is not supported",
        "NumPy in the model: there are no values before the run; use torch's operations",
    ),
    (
        "linked with support for cuda",
        "the model moves tensors to CUDA itself: take the device from its input",
    ),
    ("not compiled with CUDA", "the model moves tensors to CUDA itself: take the device from its input"),
    (
        "argument: 'closure'",
        "optimizers that call the model themselves, as often as values say, cannot be tried: try the step "
        "with another one, such as SGD; LBFGS holds up to 2 * history_size more gradients of all parameters",
    ),
    ("to be on the same device", "the model names a device itself: take the device from its input"),
)


class BrokenScriptError(UsageError):
    """Error for a script that fails in a fake run."""


@contextlib.contextmanager
def explain_failures(activity: str) -> Iterator[list[nn.Module]]:
    """Convert failures of tensors without values to `UsageError`, with module, source line, and remedy.

    Exceptions of the user's own code pass, with a note about the location and the activity. The block appends
    the running model to the list, once made.
    """
    running: list[nn.Module] = []
    try:
        yield running
    except UsageError:
        raise
    except Exception as error:
        location = _location(error.__traceback__, running)
        if (line := _explanation(error, location)) is not None:
            raise UsageError(line) from error
        error.add_note(f"mempool: while {activity}{location}")
        raise


def _explanation(error: Exception, location: str) -> str | None:
    if isinstance(error, (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)):
        activity = (
            "a value is read (.item(), a condition)" if "local_scalar" in str(error.func) else str(error.func)
        )
        return f"{activity}{location}: {_DATA}"
    text = " ".join(str(error).split())
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return f"{error.func}{location}: it has no fake kernel; register one with torch.library.register_fake"
    for sign, remedy in _REMEDIES:
        if sign in text:
            return f"{type(error).__name__}{location}: {remedy}"
    return None


def _location(trace: TracebackType | None, models: list[nn.Module]) -> str:
    """Return the innermost module of the model and the innermost line outside PyTorch and mempool."""
    names = {id(module): name for model in models for name, module in model.named_modules()}
    module, line = "", ""
    own = tuple(str(Path(package.__file__ or "").parent) for package in (torch, mempool, traces))
    for frame, number in traceback.walk_tb(trace):
        this = frame.f_locals.get("self")
        if id(this) in names and isinstance(this, nn.Module):
            module = f" in module {names[id(this)] or '(the model)'} ({type(this).__name__})"
        if not frame.f_code.co_filename.startswith((*own, "<")):
            line = f" at {frame.f_code.co_filename}:{number}"
    return module + line

"""Replacement of `torch.compile` and TorchScript, so that a program's models stay eager during a trial."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mempool.torch.estimate.sources.abort_at_backward import frames, place
from mempool.torch.estimate.sources.value_decisions import INSTALLED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_TORCHSCRIPT = ("script", "trace", "trace_module", "freeze", "optimize_for_inference")


@contextlib.contextmanager
def uncompiled(told: Callable[[str], object]) -> Iterator[None]:
    """Disable compilation in the block.

    Args:
        told: called with each `torch.compile` that is skipped, and its line; not for compilations that
            libraries make for themselves.
    """
    instead: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "compile", _noting(told, "torch.compile", _eager)),
        (nn.Module, "compile", _noting(told, "Module.compile", lambda *_, **__: None)),
        *((torch.jit, name, _eager) for name in _TORCHSCRIPT),
    ]
    with contextlib.ExitStack() as stack:
        for holder, name, function in instead:
            stack.callback(setattr, holder, name, getattr(holder, name))
            setattr(holder, name, function)
        yield


def _noting(told: Callable[[str], object], called: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    def passed_over(*args: Any, **kwargs: Any) -> Any:
        mine = [one for one in frames() if not any(part in one.f_code.co_filename for part in INSTALLED)]
        module = any(isinstance(given, nn.Module) for given in (*args, *kwargs.values()))
        if module or place().startswith(tuple(one.f_code.co_filename for one in mine[:1])):
            where = f"{mine[0].f_code.co_filename}:{mine[0].f_lineno}" if mine else place()
            told(f"{called} at {where}")
        return instead(*args, **kwargs)

    return passed_over


def _eager(model: Any = None, *_: Any, **given: Any) -> Any:
    """Replace `torch.compile`, which is also a decorator with options, and TorchScript's functions."""
    for name in ("obj", "func", "mod"):
        model = given.get(name, model)
    return (lambda function: function) if model is None else model

"""Guard that hides this project's operations from the program."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import torch
from torch._C import _DisableFuncTorch, _DisableTorchDispatch, _dispatch_key_parse

if TYPE_CHECKING:
    from collections.abc import Iterator

#: The key of the interposer, and the key under which `torch.jit.trace` records operations.
_KEYS = torch._C.DispatchKeySet(_dispatch_key_parse("DeferredInit")) | torch._C.DispatchKeySet(
    _dispatch_key_parse("Tracer")
)


@contextlib.contextmanager
def hidden_from_program() -> Iterator[None]:
    """Hide operations of this project from modes, transforms, traces and profilers of the program.

    All guards here end with their objects, even after a Ctrl-C at the exit, unlike `torch.no_grad`; bytes
    need no gradient guard.
    """
    transforms = _DisableFuncTorch()
    with (
        torch._C.DisableTorchFunction(),
        _DisableTorchDispatch(),
        torch._C._ExcludeDispatchKeyGuard(_KEYS),
        torch.inference_mode(mode=False),
    ):
        yield
    del transforms

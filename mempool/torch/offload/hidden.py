"""Operations of this project that the program must not see."""

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
    """Run operations of ours that no mode, transform, trace or mark of the program may see or change.

    All these guards end with their objects, even if Ctrl-C comes at the exit. `torch.no_grad` would not, and
    bytes need no gradient guard.
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

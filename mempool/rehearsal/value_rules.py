"""Values that a rehearsal supplies, since kernels compute none: finite numbers, known masks, repeats.

The rules replace operators in PyTorch's dispatcher, so that they apply to calls from C++, too:

* ``isfinite``, ``all`` of its result, and ``allclose`` are true, since programs assert them.
* ``nonzero``, into which PyTorch converts a mask in an index, selects no elements, or all with
``select="all"``. A mask that the host copied to the device selects its true elements.
* ``repeat_interleave`` repeats each element once if a kernel computed the number of repeats.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
import weakref
from typing import TYPE_CHECKING, Any

from mempool.rehearsal.standin import LIBRARY
from mempool.rehearsal.value_reads import note

if TYPE_CHECKING:
    from collections.abc import Callable

    Operator = Callable[..., Any]

_COPIED, _PROMISED = 1, 2  #: answers of the stand-in


def install(places: dict[str, int], select: str) -> None:
    """Replace the operators of CUDA tensors.

    Args:
        places: number of results whose shape depends on unknown values, by ``file:line``.
        select: "none" or "all", the elements that unknown masks select.
    """
    import torch

    rules = _Rules(torch, places, select)
    library = torch.library.Library("aten", "IMPL")
    for name, rule in {
        "isfinite": rules.isfinite,
        "allclose": rules.allclose,
        "all": rules.all,
        "nonzero": rules.nonzero,
        "repeat_interleave.Tensor": rules.repeat,
    }.items():
        _replace(torch, library, name, rule)
    _kept.append(library)


_kept: list[Any] = []  # a library's end would restore its operators


def _replace(torch: Any, library: Any, name: str, rule: Any) -> None:
    """Replace an operator on CUDA by a function whose first argument is the original operator."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CUDA")

    def call(keys: Any, *args: Any, **options: Any) -> Any:
        return rule(lambda *a, **o: kernel.call_boxed(keys, *a, **o), *args, **options)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about replaced operators
        library.impl(name, call, "CUDA", with_keyset=True)


class _Rules:
    """Replacements of operators; their first argument is the original operator."""

    def __init__(self, torch: Any, places: dict[str, int], select: str) -> None:
        self._torch, self._places, self._select = torch, places, select
        self._standin: Any = ctypes.CDLL(str(LIBRARY))
        range_: list[Any] = [ctypes.c_void_p, ctypes.c_size_t]
        self._standin.mempool_standin_promise.argtypes = [*range_, ctypes.c_ubyte]
        self._standin.mempool_standin_forget.argtypes = range_
        self._standin.mempool_standin_knows.argtypes = range_

    def _promise(self, result: Any) -> Any:
        """Make reads of a tensor of booleans return true while the tensor exists."""
        storage = result.untyped_storage()
        place = (storage.data_ptr(), storage.nbytes())
        self._standin.mempool_standin_promise(*place, 1)
        weakref.finalize(result, self._standin.mempool_standin_forget, *place)
        return result

    def _knowledge(self, tensor: Any) -> int:
        if not tensor.is_contiguous() or tensor.numel() == 0:
            return 0
        return int(self._standin.mempool_standin_knows(tensor.data_ptr(), tensor.nbytes))

    def isfinite(self, _: Operator, tensor: Any) -> Any:
        """Return a mask of true elements, with the memory of PyTorch's intermediate tensors."""
        torch = self._torch
        if tensor.is_complex():
            return self._promise(torch.isfinite(tensor.real).logical_and_(torch.isfinite(tensor.imag)))
        if not tensor.is_floating_point():
            return torch.ones_like(tensor, dtype=torch.bool)
        return self._promise((tensor == tensor).mul(tensor.abs() != float("inf")))

    def allclose(self, *_: Any, **__: Any) -> bool:
        """Return true."""
        return True

    def all(self, original: Operator, tensor: Any) -> Any:
        """Return true for a mask that is promised to be true."""
        result = original(tensor)
        return self._promise(result) if self._knowledge(tensor) == _PROMISED else result

    def nonzero(self, original: Operator, tensor: Any) -> Any:
        """Return the indices of a known mask, else of no elements or of all elements."""
        if self._knowledge(tensor) == _COPIED:
            return tensor.cpu().nonzero().to(tensor.device)
        note(self._places, sys._getframe(1))
        if self._select == "none":
            return original(tensor)
        return tensor.new_empty((tensor.numel(), tensor.dim()), dtype=self._torch.int64)

    def repeat(self, original: Operator, repeats: Any, output_size: int | None = None) -> Any:
        """Return the index of each repeated element."""
        if output_size is None and self._knowledge(repeats) == _COPIED:
            output_size = int(repeats.cpu().sum())
        elif output_size is None:
            note(self._places, sys._getframe(1))
            output_size = repeats.numel()
        return original(repeats, output_size=output_size)

"""Isolation of a fake run: random states, defaults and functools caches are restored afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import random
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from mempool.torch.estimate.fake.copies import tensors_in

if TYPE_CHECKING:
    from collections.abc import Iterator


_Cache = functools._lru_cache_wrapper


def caches() -> list[_Cache[Any]]:
    """Return all live functools caches (``functools.lru_cache``).

    PyTorch's own caches are excluded; frozen caches (``gc.freeze``) cannot be found.
    """
    found = [item for item in gc.get_objects() if type(item) is _Cache]
    return [cache for cache in found if not f"{getattr(cache, '__module__', '')}.".startswith("torch.")]


#: Lock of a run, which changes the process's defaults.
_LOCK = threading.RLock()
#: Functools caches that an enclosing `shared_isolation` found before it froze all objects; None outside.
_known: list[_Cache[Any]] | None = None


@contextlib.contextmanager
def shared_isolation() -> Iterator[None]:
    """Search for caches and freeze existing objects once for several runs.

    Garbage collections are then limited to objects of the runs, without the million objects of PyTorch and
    the program.
    """
    global _known
    with _LOCK:
        if _known is not None:
            yield
            return
        _known = caches()
        frozen = gc.get_freeze_count() > 0  # by the program itself
        if not frozen:
            gc.freeze()
        try:
            yield
        finally:
            _known = None
            if not frozen:
                gc.unfreeze()


@contextlib.contextmanager
def _clear_fake_caches() -> Iterator[None]:
    """Empty the functools caches that received fake tensors in the block.

    Other caches are unchanged, since the program may rely on the identity of their results.
    """
    known = [*(_known or ()), *caches()]
    before = {id(cache): cache.cache_info().misses for cache in known}
    try:
        yield
    finally:
        for cache in {id(cache): cache for cache in (*known, *caches())}.values():
            if cache.cache_info().misses > before.get(id(cache), 0) and any(
                type(item) is FakeTensor for item in tensors_in(cache)
            ):
                cache.cache_clear()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run with the defaults of a new process, then restore random states, types and modes.

    A model's code may seed generators or set the default type, which is restored. Other settings of that
    code, such as ``torch.backends.cudnn.benchmark``, and its variables, such as a dictionary of masks, are
    not restored; entries in ``functools`` caches are removed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(shared_isolation())
        stack.enter_context(_clear_fake_caches())  # searches only unfrozen objects
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy as np

            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the user's, to put back
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        # Not torch.autocast: inside its block, an inner autocast keeps its copies of the parameters at its
        # end.
        stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_enabled("cpu", False)  # noqa: FBT003 - taken by position only
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        logger = logging.getLogger("torch._subclasses.fake_tensor")  # logs the text of later exceptions
        stack.callback(setattr, logger, "disabled", logger.disabled)
        logger.disabled = True
        yield

"""Isolation of a fake run: process-wide settings and functools caches are restored afterwards."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import logging
import operator
import random
import sys
import threading
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


_Cache = functools._lru_cache_wrapper
#: Largest number of objects searched in one cache.
_MOST = 10_000
#: Types not followed in the search, since they lead out of the cache's contents.
_OUTSIDE = (type, FunctionType, ModuleType)


def caches() -> list[_Cache[Any]]:
    """Return all live functools caches (``functools.lru_cache``).

    PyTorch's own are left out; frozen ones (``gc.freeze``) cannot be found.
    """
    there = gc.get_objects()
    of_type = map(operator.is_, map(type, there), itertools.repeat(_Cache))
    found: list[_Cache[Any]] = list(itertools.compress(there, of_type))
    return [cache for cache in found if not f"{getattr(cache, '__module__', '')}.".startswith("torch.")]


@contextlib.contextmanager
def caches_forgotten(known: list[_Cache[Any]]) -> Iterator[None]:
    """Empty the functools caches into which the block put fake tensors.

    Others stay, since their results may be known by identity.

    Args:
        known: existing caches, which `caches` may no longer find.
    """
    before = {id(cache): cache.cache_info().misses for cache in known}
    try:
        yield
    finally:
        for cache in {id(cache): cache for cache in (*known, *caches())}.values():
            if cache.cache_info().misses > before.get(id(cache), 0) and _holds_fakes(cache):
                cache.cache_clear()


def _holds_fakes(cache: _Cache[Any]) -> bool:
    """Return whether a cache's keys or results contain a fake tensor, within `_MOST` objects."""
    seen: set[int] = set()
    near: list[Any] = [cache]
    while near and len(seen) < _MOST:
        found = [each for each in gc.get_referents(*near) if not isinstance(each, _OUTSIDE)]
        if any(type(each) is FakeTensor for each in found):
            return True
        near = [each for each in found if id(each) not in seen and gc.is_tracked(each)]
        seen.update(map(id, near))
    return False


#: A run changes process-wide settings, so only one runs at a time.
_ONE = threading.RLock()

#: Process-wide settings that a model's code may change: a getter and a setter of each.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *(
        (functools.partial(read, kind), functools.partial(write, kind))
        for kind in ("cpu", "cuda")
        for read, write in (
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
        )
    ),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda both: torch.set_anomaly_enabled(*both),
    ),
    *(
        (functools.partial(getattr, holder, name), functools.partial(setattr, holder, name))
        for holder, name in (
            (torch.utils.deterministic, "fill_uninitialized_memory"),
            (torch.backends.cudnn, "enabled"),
            (torch.backends.cudnn, "benchmark"),
            (torch.backends.cudnn, "deterministic"),
            (torch.backends.mkldnn, "enabled"),
        )
    ),
)


def _settings_put_back(stack: contextlib.ExitStack) -> None:
    """Restore changed settings on exit; setting an unchanged one would have side effects."""
    before = [read() for read, _ in _SETTINGS]

    def put_back() -> None:
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)

    stack.callback(put_back)


#: Functools caches found before a group of runs (`together`).
_KNOWN: list[Any] = []


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Search for caches and freeze existing objects once for several runs."""
    with _ONE:
        found = caches()
        _KNOWN.extend(found)
        try:
            with _what_was_there_set_aside():
                yield
        finally:
            del _KNOWN[len(_KNOWN) - len(found) :]


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Run with the defaults of a new process, then restore random states, types, modes and settings.

    A model's own code, too, may seed generators or set the default type. State in the model's own variables,
    such as a dictionary of masks, is not restored; entries in ``functools`` caches are removed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE)
        _settings_put_back(stack)
        known = [*_KNOWN, *caches()]
        stack.enter_context(_what_was_there_set_aside())
        stack.enter_context(caches_forgotten(known))  # searches only among objects that are not frozen
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy as np

            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the user's, to put back
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        # Not torch.autocast: inside such a block, an inner autocast that ends keeps its copies of the
        # parameters.
        stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_enabled("cpu", False)  # noqa: FBT003 - taken by position only
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(_quiet(logging.getLogger("torch._subclasses.fake_tensor")))
        yield


@contextlib.contextmanager
def _what_was_there_set_aside() -> Iterator[None]:
    """Limit garbage collection to objects made by the run: PyTorch and a program have a million objects."""
    if gc.get_freeze_count():  # the program itself froze objects
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Suppress messages that are logged before an exception is raised."""
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False

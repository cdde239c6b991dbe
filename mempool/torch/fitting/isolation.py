"""What a run must leave as it was."""

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

from mempool.torch.fitting.caches import caches, caches_forgotten

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

#: What a run sets belongs to the process, so there is one at a time.
_ONE = threading.RLock()

#: What a model's code may set for the whole process: how it is read, and how it is put back.
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
    """Afterwards, those that have changed; setting them all would have effects of its own."""
    before = [read() for read, _ in _SETTINGS]

    def put_back() -> None:
        for (read, write), value in zip(_SETTINGS, before, strict=True):
            if read() != value:
                write(value)

    stack.callback(put_back)


#: Caches of functions that were there before the runs that are made together.
_KNOWN: list[Any] = []


@contextlib.contextmanager
def together() -> Iterator[None]:
    """For several runs: what is there before them is looked through once, and set aside."""
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
    """Defaults as a new process has them, and afterwards as it was: random numbers, types, modes, settings.

    A model's own code, too, may seed generators or set the default type. What it keeps in variables of its
    own, such as a dictionary of masks, stays there; what ``functools`` caches for it does not.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE)
        _settings_put_back(stack)
        known = [*_KNOWN, *caches()]
        stack.enter_context(_what_was_there_set_aside())
        stack.enter_context(caches_forgotten(known))  # looks for new ones among what is not set aside
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        if "numpy" in sys.modules:
            import numpy as np

            stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002 - the user's, to put back
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.enable_grad())
        # Not torch.autocast: inside of one, an autocast that ends keeps its copies of the parameters.
        stack.callback(torch.set_autocast_enabled, "cpu", torch.is_autocast_enabled("cpu"))
        torch.set_autocast_enabled("cpu", False)  # noqa: FBT003 - taken by position only
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        stack.enter_context(_quiet(logging.getLogger("torch._subclasses.fake_tensor")))
        yield


@contextlib.contextmanager
def _what_was_there_set_aside() -> Iterator[None]:
    """Garbage is looked for among what a run makes only: PyTorch and a program are a million objects."""
    if gc.get_freeze_count():  # the program's own doing
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Without what is logged before it is raised."""
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False

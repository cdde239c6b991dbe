"""What a run must leave as it was."""

from __future__ import annotations

import contextlib
import gc
import logging
import random
import sys
import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What a run sets belongs to the process, so there is one at a time.
_ONE = threading.RLock()


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Defaults as a new process has them, and afterwards all as it was: random numbers, types, modes.

    A model's own code, too, may seed generators or set the default type.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ONE)
        stack.enter_context(_what_was_there_set_aside())
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

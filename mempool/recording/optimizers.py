"""Search for the PyTorch optimizer whose hooks are called, inside wrappers around that optimizer.

Frameworks often hand out a wrapper around another optimizer (accelerate's, which transformers' `Trainer`
gives to callbacks; Lightning's). A wrapper may pass for PyTorch's optimizer, but no hook is called when the
wrapper steps, and not every step of the wrapper is a step of the optimizer inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Most wrappers that are unwrapped: frameworks stack two or three; an optimizer that refers to itself, or a
#: mock, ends there.
DEEPEST = 8


def hooked_optimizer(given: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose hooks are called: the given one or one inside; None if there is none."""
    for _ in range(DEEPEST):
        if "_optimizer_step_post_hooks" in getattr(given, "__dict__", {}):  # constructed by PyTorch
            found: torch.optim.Optimizer = given
            return found
        # A scheduler or a trainer has an optimizer, too, but is not an optimizer.
        if not (hasattr(given, "step") and hasattr(given, "zero_grad")):
            return None
        given = getattr(given, "optimizer", None)
    return None

"""Which optimizer PyTorch's hooks are told of, where others stand around it.

What frameworks hand out often stands around another optimizer (accelerate's, which transformers' `Trainer`
gives its callbacks; Lightning's). It may pass for PyTorch's, but no hook is called when it steps, and not
every step of its own is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Frameworks stack two or three; what is its own optimizer, or a mock, ends there.
DEEPEST = 8


def hooked_optimizer(given: Any) -> torch.optim.Optimizer | None:
    """The one whose hooks are called: what is given, or what that stands around; None if there is none."""
    for _ in range(DEEPEST):
        if "_optimizer_step_post_hooks" in getattr(given, "__dict__", {}):  # PyTorch has made it
            found: torch.optim.Optimizer = given
            return found
        # A scheduler or a trainer has an optimizer, too, but is none.
        if not (hasattr(given, "step") and hasattr(given, "zero_grad")):
            return None
        given = getattr(given, "optimizer", None)
    return None

"""Search for the PyTorch optimizer inside wrappers of frameworks.

Frameworks often pass a wrapper around an optimizer (accelerate's, which transformers' `Trainer` passes to
callbacks; Lightning's). A wrapper may be an instance of PyTorch's class, but its steps call no hooks, and not
every step of the wrapper is a step of the optimizer inside.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: Most nested wrappers: frameworks nest two or three. The bound ends the search in an optimizer that refers
#: to itself, and in a mock.
DEEPEST = 8


def hooked_optimizer(given: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer whose steps call hooks: `given`, or an optimizer inside; None without one."""
    for _ in range(DEEPEST):
        if "_optimizer_step_post_hooks" in getattr(given, "__dict__", {}):  # constructed by PyTorch
            found: torch.optim.Optimizer = given
            return found
        # A scheduler or a trainer has an optimizer, too, but is not an optimizer.
        if not (hasattr(given, "step") and hasattr(given, "zero_grad")):
            return None
        given = getattr(given, "optimizer", None)
    return None

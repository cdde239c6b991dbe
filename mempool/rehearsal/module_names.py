"""Names of modules in PyTorch's history of allocations."""

from __future__ import annotations

import warnings
import weakref
from typing import Any


def attach(torch: Any) -> None:
    """Attach the path of the innermost running module to each allocation of a forward pass."""
    from torch.nn.modules.module import (
        register_module_forward_hook,
        register_module_forward_pre_hook,
    )
    from torch.optim.optimizer import register_optimizer_step_post_hook

    paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
    entered: list[str] = []

    def enter(module: Any, _inputs: Any) -> None:
        if torch.compiler.is_compiling():  # the graph has no modules
            return
        module = getattr(module, "_orig_mod", module)  # of a compiled module
        if module not in paths:  # the root of an unknown tree: name its modules
            for path, inner in module.named_modules():
                paths.setdefault(inner, f"{type(module).__name__}.{path}" if path else type(module).__name__)
        entered.append(paths[module])
        torch.cuda.memory._set_memory_metadata(entered[-1])

    def leave(_module: Any, _inputs: Any, _output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if entered:
            entered.pop()
        torch.cuda.memory._set_memory_metadata(entered[-1] if entered else "")

    # PyTorch warns of hooks on compiled modules.
    warnings.filterwarnings("ignore", ".*when there are global hooks on modules", UserWarning)
    register_module_forward_pre_hook(enter)
    # Also called after exceptions, such as the one that ends a checkpoint's recomputation.
    register_module_forward_hook(leave, always_call=True)
    register_optimizer_step_post_hook(lambda *_: None if torch.compiler.is_compiling() else entered.clear())

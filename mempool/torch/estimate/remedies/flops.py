"""Counts of floating-point operations of a forward, in total and per module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn


class Operations(TorchDispatchMode):
    """Counter of the operations for which PyTorch has formulas (matrix products, convolutions, attention).

    Attributes:
        total: operations of all calls inside the ``with`` block.
        inside: for each module, the operations that ran inside the module.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.total, self.inside = 0, [0] * len(modules)
        self._modules = modules
        self._open: list[int] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> Self:
        for at, module in enumerate(self._modules):
            self._hooks.append(module.register_forward_pre_hook(lambda *_, at=at: self._open.append(at)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._close()))
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        for hook in self._hooks:
            hook.remove()

    def _close(self) -> None:
        self._open.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            count = formula(*args, **(kwargs or {}), out_val=result)
            self.total += count
            for at in set(self._open):
                self.inside[at] += count
        return result

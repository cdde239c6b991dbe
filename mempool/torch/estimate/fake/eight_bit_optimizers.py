"""Stand-ins for optimizers of bitsandbytes: the memory of their state, without steps and CUDA kernels.

The layout, except for two tables of 1 KiB, is that of bitsandbytes 0.44 and later (`init_state` in its
optim/optimizer.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

#: Elements of an 8-bit state per float32 scale.
BLOCK = 256
#: Smallest number of elements with an 8-bit state.
LEAST_8BIT = 4096
#: State values per element of a parameter, by name in `bitsandbytes.optim`.
MOMENTS = {
    "Adam8bit": 2, "AdamW8bit": 2, "Lion8bit": 1, "SGD8bit": 1, "RMSprop8bit": 1, "Adagrad8bit": 1,
}  # fmt: skip


class Blockwise(torch.optim.Optimizer):
    """Stand-in for an optimizer of bitsandbytes: its memory, without its steps."""

    moments = 2

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, {"lr": lr} | settings)

    @classmethod
    def state_of(cls, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of one parameter, without values."""
        eight = parameter.numel() >= LEAST_8BIT
        made = {}
        for number in range(1, cls.moments + 1):
            made[f"state{number}"] = parameter.new_empty(
                parameter.shape, dtype=torch.uint8 if eight else torch.float32
            )
            if eight:
                blocks = -(-parameter.numel() // BLOCK)
                made[f"absmax{number}"] = parameter.new_empty(blocks, dtype=torch.float32)
        return made

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as of the base
        """Make missing state, and access all tensors that an update accesses."""
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in held:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.state_of(parameter))
                for tensor in (*state.values(), parameter):
                    tensor.mul_(1)


#: Stand-ins by the names of `bitsandbytes.optim`: "AdamW8bit", "Lion8bit", ...
STAND_INS = {
    name: type(name, (Blockwise,), {"moments": moments, "__module__": "bitsandbytes.optim"})
    for name, moments in MOMENTS.items()
}

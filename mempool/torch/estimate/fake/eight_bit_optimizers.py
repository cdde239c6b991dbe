"""Optimizers of bitsandbytes by the memory of their state: no step is computed, no CUDA kernel needed.

The layout, except for two tables of 1 KiB, is that of bitsandbytes 0.44 and later (`init_state` in its
optim/optimizer.py and ademamix.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

PACKAGE = "bitsandbytes"
#: Elements of an 8-bit state that share one float32.
BLOCK = 256
#: Smallest numbers of elements that are kept in 8 bits, and whose state is paged.
LEAST_8BIT, LEAST_PAGED = 4096, 100_000
#: Values of state for each element of a parameter, by name of the family.
MOMENTS = {
    "Adam": 2, "AdamW": 2, "LAMB": 2, "AdEMAMix": 3, "Lion": 1, "SGD": 1, "RMSprop": 1, "Adagrad": 1,
    "LARS": 1,
}  # fmt: skip
_PAGED, _NORMS = ("Adam", "AdamW", "AdEMAMix", "Lion"), ("LAMB", "LARS")


@dataclass(frozen=True)
class Layout:
    """Layout of an optimizer's state.

    Attributes:
        moments: values for each element of a parameter.
        bits: of a value, 8 or 32.
        paged: whether large states are in unified memory, which moves to the host if the GPU is full.
        least_8bit: number of elements below which a parameter's state is in 32 bits.
        norms: whether the state has a norm for each parameter.
    """

    moments: int
    bits: int
    paged: bool = False
    least_8bit: int = LEAST_8BIT
    norms: bool = False

    def state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of one parameter, without values."""
        eight = self.bits == 8 and parameter.numel() >= self.least_8bit
        dtype = torch.uint8 if eight else torch.float32
        blocks = -(-parameter.numel() // BLOCK)
        sizes = [2, 1] if self.moments == 3 else [1] * self.moments
        made: dict[str, Any] = {}
        for number, size in enumerate(sizes, 1):
            shape = (2, *parameter.shape) if size == 2 else parameter.shape
            made[f"state{number}"] = state = parameter.new_empty(shape, dtype=dtype)
            state.of_host = self.paged and parameter.numel() >= LEAST_PAGED
            if eight:
                made[f"absmax{number}"] = parameter.new_empty(size * blocks, dtype=torch.float32)
        return made | ({"unorm_vec": parameter.new_empty(1, dtype=torch.float32)} if self.norms else {})


class Blockwise(torch.optim.Optimizer):
    """Stand-in for an optimizer of bitsandbytes: its memory, without its steps."""

    layout = Layout(2, 8)

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **settings: Any) -> None:
        super().__init__(params, {"lr": lr} | settings)

    def step(self, closure: Any = None) -> None:  # noqa: ARG002 - as of the base
        """Make missing state, and touch all tensors that an update touches."""
        held = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in held:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.layout.state_of(parameter))
                for tensor in (*state.values(), parameter):
                    tensor.mul_(1)


def _stand_ins() -> dict[str, type[Blockwise]]:
    """Make the classes of `bitsandbytes.optim`, by name."""
    made = {}
    for family, moments in MOMENTS.items():
        for paged in (False, True)[: 1 + (family in _PAGED)]:
            for bits in (0, 8, 32):
                name = f"{'Paged' * paged}{family}{f'{bits}bit' if bits else ''}"
                layout = Layout(moments, bits or 32, paged, norms=family in _NORMS)
                made[name] = type(name, (Blockwise,), {"layout": layout, "__module__": f"{PACKAGE}.optim"})
    return made


#: Stand-ins by the names of `bitsandbytes.optim`: "AdamW8bit", "PagedLion", ...
STAND_INS = _stand_ins()

"""Operators for offload and reload in graphs: asynchronous with a separate wait, or synchronous.

The operators take and return tensors only, and mutate and alias none, so that any graph compiler derives the
order from data dependencies alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from mempool.torch.compiled.runtime import RUNTIME, empty_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY = torch.library.Library("mempool", "DEF")
_PLACE = "SymInt[] size, SymInt[] stride, ScalarType dtype, Device device"
#: Tag that makes a graph compiler use the traced strides for an offloaded value, so that the reload needs no
#: second copy.
_AS_TRACED = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define("offload(Tensor value, int host_limit, int at=-1) -> Tensor", tags=_AS_TRACED)
# The wait has the offloaded value as an argument, so that a compiler keeps the memory until the copy ends.
LIBRARY.define("offload_wait(Tensor ticket, Tensor value) -> Tensor")
LIBRARY.define("offload_sync(Tensor value, int host_limit, int at=-1) -> Tensor", tags=_AS_TRACED)
LIBRARY.define(f"reload(Tensor ticket, {_PLACE}) -> Tensor")
LIBRARY.define(f"reload_wait(Tensor ticket, {_PLACE}) -> Tensor")
LIBRARY.define(f"reload_sync(Tensor ticket, {_PLACE}) -> Tensor")


def _fake_ticket(*_: object) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_tensor(
    _: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


_Kernel = Callable[..., torch.Tensor]
_KERNELS: dict[str, tuple[_Kernel, _Kernel]] = {
    "offload": (RUNTIME.offload, _fake_ticket),
    "offload_wait": (lambda ticket, _: RUNTIME.offload_wait(ticket), _fake_ticket),
    "offload_sync": (RUNTIME.offload_sync, _fake_ticket),
    "reload": (lambda ticket, *layout: RUNTIME.reload(ticket, empty_tensor(*layout)), _fake_ticket),
    "reload_wait": (lambda ticket, *_: RUNTIME.reload_wait(ticket), _fake_tensor),
    "reload_sync": (lambda ticket, *layout: RUNTIME.reload_sync(ticket, empty_tensor(*layout)), _fake_tensor),
}
for _name, (_real, _fake) in _KERNELS.items():
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mempool::{_name}", _fake, lib=LIBRARY)

offload = torch.ops.mempool.offload.default
offload_wait = torch.ops.mempool.offload_wait.default
reload = torch.ops.mempool.reload.default
reload_wait = torch.ops.mempool.reload_wait.default
offload_sync = torch.ops.mempool.offload_sync.default
reload_sync = torch.ops.mempool.reload_sync.default

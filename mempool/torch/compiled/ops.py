"""Operators for offload and reload in graphs: asynchronous with a separate wait, or synchronous.

The operators take and return tensors only, so that data dependencies alone give the order for any graph
compiler: nothing is mutated, nothing aliased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mempool.torch.compiled.runtime import RUNTIME, empty_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY = torch.library.Library("mempool", "DEF")
_PLACE = "SymInt[] size, SymInt[] stride, ScalarType dtype, Device device"
#: Tag that makes a graph compiler lay out an offloaded value as traced, so that the reload needs no second
#: copy.
_AS_TRACED = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define("offload(Tensor value, int host_limit, int at=-1) -> Tensor", tags=_AS_TRACED)
# The wait takes the offloaded value as an argument, which keeps the value alive until the copy has ended.
# Otherwise a compiler may reuse that memory.
LIBRARY.define("offload_wait(Tensor ticket, Tensor value) -> Tensor")
LIBRARY.define("offload_sync(Tensor value, int host_limit, int at=-1) -> Tensor", tags=_AS_TRACED)
LIBRARY.define(f"reload(Tensor ticket, {_PLACE}) -> Tensor")
LIBRARY.define(f"reload_wait(Tensor ticket, {_PLACE}) -> Tensor")
LIBRARY.define(f"reload_sync(Tensor ticket, {_PLACE}) -> Tensor")


def _offload(value: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
    return RUNTIME.offload(value, host_limit, at)


def _offload_wait(ticket: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG001  # see above
    return RUNTIME.offload_wait(ticket)


def _reload(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return RUNTIME.reload(ticket, empty_tensor(size, stride, dtype, device))


def _reload_wait(
    ticket: torch.Tensor,
    size: Sequence[int],  # noqa: ARG001  # for the fake one
    stride: Sequence[int],  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
) -> torch.Tensor:
    return RUNTIME.reload_wait(ticket)


def _offload_sync(value: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
    return RUNTIME.offload_sync(value, host_limit, at)


def _reload_sync(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return RUNTIME.reload_sync(ticket, empty_tensor(size, stride, dtype, device))


def _fake_ticket(*_: object) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_tensor(
    _: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _real, _fake in (
    ("offload", _offload, _fake_ticket),
    ("offload_wait", _offload_wait, _fake_ticket),
    ("reload", _reload, _fake_ticket),
    ("reload_wait", _reload_wait, _fake_tensor),
    ("offload_sync", _offload_sync, _fake_ticket),
    ("reload_sync", _reload_sync, _fake_tensor),
):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mempool::{_name}", _fake, lib=LIBRARY)

offload = torch.ops.mempool.offload.default
offload_wait = torch.ops.mempool.offload_wait.default
reload = torch.ops.mempool.reload.default
reload_wait = torch.ops.mempool.reload_wait.default
offload_sync = torch.ops.mempool.offload_sync.default
reload_sync = torch.ops.mempool.reload_sync.default

"""Operators for offload and reload in graphs: asynchronous with a separate wait, or synchronous.

The operators take and return tensors only, so that data dependencies alone give the order for any graph
compiler: nothing is mutated, nothing aliased.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mempool.torch.compiled.runtime import RUNTIME
from mempool.torch.compiled.tensor_layout import room

if TYPE_CHECKING:
    from collections.abc import Sequence

LIBRARY = torch.library.Library("mempool", "DEF")
_PLACE = "SymInt[] size, SymInt[] stride, ScalarType dtype, Device device"
#: Tag that makes a graph compiler lay out an offloaded value as traced, so that the reload needs no second
#: copy.
_AS_TRACED = (torch.Tag.needs_fixed_stride_order,)
LIBRARY.define("swap_out(Tensor value, int host_limit, int at=-1) -> Tensor", tags=_AS_TRACED)
# The wait takes the offloaded value as an argument, which keeps the value alive until the copy has ended.
# Otherwise a compiler may reuse that memory.
LIBRARY.define("swapped_out(Tensor ticket, Tensor value) -> Tensor")
LIBRARY.define("sent(Tensor value, int host_limit, int at=-1) -> Tensor", tags=_AS_TRACED)
LIBRARY.define(f"swap_in(Tensor ticket, {_PLACE}) -> Tensor")
LIBRARY.define(f"swapped_in(Tensor ticket, {_PLACE}) -> Tensor")
LIBRARY.define(f"fetched(Tensor ticket, {_PLACE}) -> Tensor")


def _swap_out(value: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
    return RUNTIME.out(value, host_limit, at)


def _swapped_out(ticket: torch.Tensor, value: torch.Tensor) -> torch.Tensor:  # noqa: ARG001  # see above
    return RUNTIME.released(ticket)


def _swap_in(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return RUNTIME.back(ticket, room(size, stride, dtype, device))


def _swapped_in(
    ticket: torch.Tensor,
    size: Sequence[int],  # noqa: ARG001  # for the fake one
    stride: Sequence[int],  # noqa: ARG001
    dtype: torch.dtype,  # noqa: ARG001
    device: torch.device,  # noqa: ARG001
) -> torch.Tensor:
    return RUNTIME.arrived(ticket)


def _sent(value: torch.Tensor, host_limit: int, at: int = -1) -> torch.Tensor:
    return RUNTIME.sent(value, host_limit, at)


def _fetched(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return RUNTIME.fetched(ticket, room(size, stride, dtype, device))


def _fake_ticket(*_: object) -> torch.Tensor:
    return torch.empty(1, dtype=torch.int64, device="cpu")


def _fake_tensor(
    _: torch.Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


for _name, _real, _fake in (
    ("swap_out", _swap_out, _fake_ticket),
    ("swapped_out", _swapped_out, _fake_ticket),
    ("swap_in", _swap_in, _fake_ticket),
    ("swapped_in", _swapped_in, _fake_tensor),
    ("sent", _sent, _fake_ticket),
    ("fetched", _fetched, _fake_tensor),
):
    LIBRARY.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mempool::{_name}", _fake, lib=LIBRARY)

swap_out = torch.ops.mempool.swap_out.default
swapped_out = torch.ops.mempool.swapped_out.default
swap_in = torch.ops.mempool.swap_in.default
swapped_in = torch.ops.mempool.swapped_in.default
sent = torch.ops.mempool.sent.default
fetched = torch.ops.mempool.fetched.default

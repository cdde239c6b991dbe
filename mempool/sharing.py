"""Checks and settings for pools that share the memory of another pool."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mempool import _core, cuda
from mempool.errors import UsageError
from mempool.settings import EVERYTHING, NEVER

if TYPE_CHECKING:
    from mempool.pool import Pool
    from mempool.settings import Settings

#: Settings of the memory itself, common to all pools that share the memory.
COMMON = ("max_reserved", "small_bytes", "memory")


def check(
    share: Pool, own: Settings, device: str | _core.Device | None, given: dict[str, Any], price: int
) -> int:
    """Check that a pool can use the memory of another pool, and return the price of a wait.

    Args:
        share: pool that owns the memory.
        own: settings of the new pool.
        device: requested device, or None.
        given: options of the call.
        price: bytes that a plan should save for each wait.

    Raises:
        UsageError: the memory cannot be shared this way.
    """
    from mempool.pool import Pool

    if not isinstance(share, Pool):
        raise UsageError(f"share is {share!r}, not a pool")
    if share.state == "closed":
        raise UsageError(f"{share!r} is closed: only an open pool can be shared")
    if not share.can_be_shared:
        raise UsageError(
            f"the memory of {share!r} is PyTorch's: to share it, install that pool with backend='pluggable'"
        )
    if not (
        device is None
        or device is share.device
        or (device == "host" and isinstance(share.device, _core.HostDevice))
    ):
        raise UsageError(f"{share!r} has another device: leave device out, or share a pool of {device!r}")
    for name in COMMON:
        requested, present = getattr(own, name), getattr(share.settings, name)
        if given.get(name) is not None and requested != present:
            raise UsageError(f"{name} is {requested}, and {present} in the pool to share: leave it out")
    if own.check or share.settings.check:
        raise UsageError("check=True lays every buffer between redzones: such a pool shares with nobody")
    return _price(share, price, asked=given.get("wait_bytes") is not None)


def _price(share: Pool, price: int, *, asked: bool) -> int:
    """Return the price of a wait; raise if only one of the two pools lets streams share memory."""
    if price >= NEVER and share.shares_streams:
        raise UsageError(
            f"in {share!r} streams share memory after an event, which is not safe here: make that pool with "
            "wait_bytes='never', or give wait_bytes here if no program frees what another stream still uses"
        )
    if price < NEVER and not share.shares_streams:
        if asked:
            raise UsageError(f"wait_bytes is {price}, and in {share!r} streams share nothing: leave it out")
        return NEVER
    return price


def settings_of(share: Pool, own: Settings, price: int) -> Settings:
    """Return the new pool's settings, with the shared memory's settings and the price of a wait."""
    common = {name: getattr(share.settings, name) for name in COMMON}
    return dataclasses.replace(own, wait_bytes=price, **common)


def other_clients(pool: Pool) -> list[str]:
    """Return the names of the other clients of a pool's memory."""
    names = pool.core.clients()
    names.remove(pool.name)
    return names


def pool_of(share: Any, index: int | None) -> Any:
    """Return the pool to share; of CuPy's pools per device, the pool of ``index`` or the first."""
    if share is None or not hasattr(share, "pools"):
        return share
    return share.pool(index if index is not None else next(iter(share.pools), 0))


def keep_as_closed(pool: Pool) -> None:
    """Retain free memory for a closed pool that still serves: all, or none if other pools share it."""
    pool.core.trim()
    pool.client.set_retained_limit(0 if other_clients(pool) else EVERYTHING)


def cuda_device(
    index: int | None, driver: str, share: Pool | None, memory: str = "plain"
) -> _core.CudaDevice:
    """Return a CUDA device with memory of this kind, or the device of the pool to share.

    Raises:
        UsageError: the driver is missing or too old, or the pool to share has another device.
    """
    if share is None:
        return cuda.device(index, driver, memory)
    device = getattr(share, "device", None)
    if not isinstance(device, _core.CudaDevice):
        raise UsageError(f"{share!r} is no pool of a CUDA device")
    if index is not None and not device.bind(index):
        raise UsageError(f"{share!r} is of CUDA device {device.index}, not {index}")
    share.client.device_is_bound()
    return device

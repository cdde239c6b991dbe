"""CNMeM, the pool of Theano, SINGA and early RMM."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native, check_bytes, check_flag


@dataclass(frozen=True)
class Cnmem(Native):
    """CNMeM (``src/cnmem.cpp`` of NVIDIA/cnmem, `Manager`), with nothing reserved before the first request.

    Sizes are rounded up to 512 bytes. A request takes the smallest sufficient free block of the stream's
    list, the lowest of equal ones; the remainder is split off. A freed block merges with free neighbours, but
    not across the bounds of a region reserved in one driver call. A list without a sufficient block takes a
    block of exactly that size from the default stream's list, for good; the default stream's list calls the
    driver. As a last resort a block is stolen from another stream's list; the block's parent region never
    becomes whole again.

    Not modelled: the waits that these steps need. CNMeM's `stealBlockUnsafe` returns the address *behind* the
    stolen block if the block is not at the start of the parent, so that two buffers overlap; this simulation
    returns the block itself. `cnmemInit` requires a first block: in this simulation one of 0 bytes.

    Attributes:
        grows: False: the flag ``CNMEM_FLAGS_CANNOT_GROW``, no driver call after the first block.
    """

    grows: bool = True

    def __post_init__(self) -> None:
        check_flag(self.grows, "grows")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCnmem:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedCnmem(device, first=0, grows=self.grows)


@dataclass(frozen=True)
class CnmemFirstBlock(Cnmem):
    """CNMeM with an initial block, from which the first requests are served.

    Attributes:
        first_block_bytes: rounded up to 512. The default is that of SINGA (``init_size`` of `MemPoolConf`,
            ``src/proto/core.proto``), with which the published figures of SmartPool compare; CNMeM's own
            default, for a request of 0, is half of the device. On a smaller device nothing can be served.
    """

    first_block_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bytes(self.first_block_bytes, "first_block_bytes", least=1)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCnmem:
        """Create the allocator, see `Native.on`."""
        return _core.SimulatedCnmem(device, first=self.first_block_bytes, grows=self.grows)

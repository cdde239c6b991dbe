"""CNMeM, the pool of Theano, SINGA and early RMM."""

from __future__ import annotations

from dataclasses import dataclass

from solvers import _core
from solvers.simulators.native import Native, check_bytes, check_flag


@dataclass(frozen=True)
class Cnmem(Native):
    """CNMeM (``src/cnmem.cpp`` of NVIDIA/cnmem, `Manager`), as if it took nothing before the first request.

    Sizes are rounded up to 512 bytes. A request takes the smallest free block of its stream's list, the
    lowest of its size; what is left is split off. What is freed merges with its neighbours, but not across
    what was asked of the driver in one piece. A list that has nothing takes a block of just that size from
    the default stream's, for good; that one asks the driver. At last a block is stolen from another
    stream's list, and what it was cut from never becomes whole again.

    Not modelled: the waits that all this needs. CNMeM's `stealBlockUnsafe` answers with the address
    *behind* the block that it has stolen, where that does not begin what it is part of, so that two buffers
    overlap; here it is the block itself. `cnmemInit` cannot do without a first block: here it is one of no
    bytes.

    Attributes:
        grows: False: the flag ``CNMEM_FLAGS_CANNOT_GROW``, the driver is not asked after the first block.
    """

    grows: bool = True

    def __post_init__(self) -> None:
        check_flag(self.grows, "grows")

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCnmem:
        """As of the base."""
        return _core.SimulatedCnmem(device, first=0, grows=self.grows)


@dataclass(frozen=True)
class CnmemFirstBlock(Cnmem):
    """CNMeM as it begins: with one block, from which the first requests are served.

    Attributes:
        first_block_bytes: rounded up to 512. The default is that of SINGA (``init_size`` of `MemPoolConf`,
            ``src/proto/core.proto``), which the published figures of SmartPool compare with; CNMeM's own,
            asked for 0, is half of the device. Where the device has less, nothing can be served.
    """

    first_block_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bytes(self.first_block_bytes, "first_block_bytes", least=1)

    def on(self, device: _core.SimulatedDevice) -> _core.SimulatedCnmem:
        """As of the base."""
        return _core.SimulatedCnmem(device, first=self.first_block_bytes, grows=self.grows)

"""Registry of the simulated allocators.

To add an allocator, write a file with a dataclass of the settings, and a line here.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from solvers.simulators.bfc import Bfc
from solvers.simulators.buddy import Buddy
from solvers.simulators.cnmem import Cnmem, CnmemFirstBlock
from solvers.simulators.cupy import Cupy
from solvers.simulators.fits import BestFit, FirstFit
from solvers.simulators.planned import Planned
from solvers.simulators.pytorch import PyTorch, PyTorchExpandable
from solvers.simulators.rmm import RmmArena, RmmBinning, RmmPool

if TYPE_CHECKING:
    from collections.abc import Mapping

    from solvers.simulators.native import Allocator

#: Classes of settings by name, in the order of comparison tables.
ALLOCATORS: Mapping[str, type[Allocator]] = types.MappingProxyType(
    {
        "pytorch": PyTorch,
        "pytorch_expandable": PyTorchExpandable,
        "cupy": Cupy,
        "cnmem": Cnmem,
        "cnmem_first_block": CnmemFirstBlock,
        "bfc": Bfc,
        "rmm_pool": RmmPool,
        "rmm_arena": RmmArena,
        "rmm_binning": RmmBinning,
        "buddy": Buddy,
        "best_fit": BestFit,
        "first_fit": FirstFit,
        "planned": Planned,
    }
)

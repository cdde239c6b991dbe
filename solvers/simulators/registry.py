"""The simulated allocators by name. A new one is a file with a dataclass of its settings, and a line here."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING

from solvers.simulators.fits import BestFit, FirstFit
from solvers.simulators.pytorch import PyTorch, PyTorchExpandable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from solvers.simulators.native import Allocator

#: Classes of settings by name, in the order in which comparisons show them.
ALLOCATORS: Mapping[str, type[Allocator]] = types.MappingProxyType(
    {
        "pytorch": PyTorch,
        "pytorch_expandable": PyTorchExpandable,
        "best_fit": BestFit,
        "first_fit": FirstFit,
    }
)
